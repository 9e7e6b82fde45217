"""Shell scripts and Dockerfiles by their linters, which the extra `dev` installs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [*sorted((ROOT / "cluster").rglob("*.sbatch")), *sorted((ROOT / "cluster").rglob("*.sh")), ROOT / ".ci/run"]
DOCKERFILES = sorted((ROOT / "cluster/docker").glob("Dockerfile.*"))
LAUNCHED = sorted((ROOT / "cluster").glob("*/cluster.yaml"))


def tool(name: str) -> str:
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    assert found is not None, f"{name} is not installed: make install"
    return found


def lint(*command: str, text: str | None = None) -> str:
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=900, check=False)
    return done.stdout + done.stderr if done.returncode else ""


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    assert lint(tool("shellcheck"), str(script)) == ""


@pytest.mark.parametrize("manifest", LAUNCHED, ids=lambda path: path.parent.name)
def test_shellcheck_finds_nothing_in_the_commands_of_rays_launcher(manifest: Path) -> None:
    config = yaml.safe_load(manifest.read_text())
    keys = [key for key in config if key.endswith("_commands")]
    commands = [command for key in keys for command in config[key]]
    assert len(commands) > 4
    # RAY_HEAD_IP is Ray's, an address.
    assert lint(tool("shellcheck"), "-s", "bash", "-e", "SC2086,SC2154", "-", text="\n".join(commands)) == ""


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.suffix)
def test_hadolint_finds_nothing(dockerfile: Path) -> None:
    assert lint(tool("hadolint"), str(dockerfile)) == ""


def test_the_linters_would_find_a_mistake(tmp_path: Path) -> None:
    assert "SC2086" in lint(tool("shellcheck"), "-s", "bash", "-", text="rm -rf $1\n")
    (tmp_path / "Dockerfile").write_text("FROM debian\n")
    assert "DL3006" in lint(tool("hadolint"), str(tmp_path / "Dockerfile"))
