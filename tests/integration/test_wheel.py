"""The wheel as a user installs it: in an environment of its own, used from an empty folder, without the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that holds the wheel, and borrows all other packages from this one."""
    folder = tmp_path_factory.mktemp("wheel")
    # From a copy: a build writes rl_vlm.egg-info, in which other tests look up environments.
    source = folder / "source"
    for name in ("rl_vlm", "configs"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = ["uv", "build", "--quiet", "--offline", "--no-build-isolation", "--wheel", "--out-dir", str(folder)]
    subprocess.run([sys.executable, "-m", *build, str(source)], check=True, timeout=300)
    (wheel,) = folder.glob("rl_vlm-*.whl")
    venv.create(folder / "venv", symlinks=True)
    here = folder / "venv/bin"
    install = [
        "uv",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--offline",
        "--python",
        str(here / "python"),
        str(wheel),
    ]
    subprocess.run([sys.executable, "-m", *install], check=True, timeout=120)
    # Behind the wheel on the path, and without what .pth files there would add, such as the checkout.
    purelib = subprocess.run(
        [here / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout.strip()  # fmt: skip
    (Path(purelib) / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    return here


def call(installed: Path, folder: Path, *command: str) -> str:
    """Run a command of the environment in a folder; return what it printed."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [installed / command[0], *command[1:]], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def test_recipes_come_with_the_wheel(installed: Path, tmp_path: Path) -> None:
    files = {path.relative_to(ROOT / "configs").with_suffix("").as_posix() for path in ROOT.glob("configs/**/*.yaml")}
    listed = json.loads(call(installed, tmp_path, "rl-vlm", "recipes", "--json"))
    assert {recipe["name"] for recipe in listed} == files
    script = (
        "import rl_vlm; from pathlib import Path; from rl_vlm.config import load_config;"
        "print(Path(rl_vlm.__file__).with_name('py.typed').is_file(), rl_vlm.__file__);"
        "print(load_config('quickstart').name, load_config('rl_vlm_f/drawer_open').name)"
    )
    first, second = call(installed, tmp_path, "python", "-c", script).splitlines()
    assert (
        first
        == f"True {installed.parent}/lib/{Path(sysconfig.get_path('purelib')).parent.name}/site-packages/rl_vlm/__init__.py"
    )
    assert second == "quickstart drawer-open"


def test_a_recipe_of_the_wheel_passes_a_dry_run(installed: Path, tiny_folder: Path, tmp_path: Path) -> None:
    printed = call(installed, tmp_path, "rl-vlm", "train", "quickstart", "--dry-run", f"model.path={tiny_folder}")
    assert "quickstart: nothing is wrong" in printed


@pytest.mark.parametrize("kind", [(), ("--agent",)])
def test_a_project_of_the_wheel_passes_its_test_and_a_dry_run(
    kind: tuple[str, ...], installed: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    call(installed, tmp_path, "rl-vlm", "init", "mine", *kind)
    folder = tmp_path / "mine"
    assert "passed" in call(installed, folder, "python", "-m", "pytest", "-q")
    printed = call(installed, folder, "rl-vlm", "train", "config.yaml", "--dry-run", f"model.path={tiny_folder}")
    assert "mine: nothing is wrong" in printed
