"""What lies beside the code: lint after a run, CI's steps, hooks, templates, ignored folders."""

from __future__ import annotations

import ast
import configparser
import importlib
import importlib.util
import inspect
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_vlm.config import PolicyConfig, PreferenceConfig, load_config
from rl_vlm.config.section import keys_of
from rl_vlm.envs.foreign.slime import SlimeEnv
from rl_vlm.zoo.geo3k.environment import Geo3kEnv

ROOT = Path(__file__).resolve().parents[2]
LEFT_BY_TOOLS = (
    ".venv/x", ".venv-3.12/x", "runs/quickstart/config.yaml", ".hypothesis/x", ".pytest_cache/x",
    ".mypy_cache/x", ".ruff_cache/x", "rl_vlm/__pycache__/x.pyc", "build/x", "dist/x.whl", "rl_vlm.egg-info/x",
    ".coverage", "htmlcov/x", ".DS_Store", ".idea/x", ".vscode/x", "core.1234",
)  # fmt: skip


def test_no_two_test_files_have_one_name() -> None:
    """`make acceptance` collects all folders at once, and pytest refuses a second module of a name."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert sorted(names) == sorted(set(names))


def _executable(path: Path, script: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("failing", ["", "test"])
def test_ci_makes_everything_in_order_and_ends_with_the_times(tmp_path: Path, failing: str) -> None:
    clone, tools, log = tmp_path / "clone", tmp_path / "bin", tmp_path / "log"
    (clone / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci/run", clone / ".ci/run")
    _executable(tools / "make", f'echo "$@" >> {log}; [ "$1" != "{failing}" ] || exit 7')
    for name in ("git", "chromium"):
        _executable(tools / name, "exit 0")
    environment = {**os.environ, "PATH": f"{tools}:/usr/bin:/bin"}
    done = subprocess.run(
        [clone / ".ci/run"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    wanted = ["-j3 page browser install", "quickstart", "test", "slow"]
    wanted = wanted[: wanted.index(failing) + 1] if failing else wanted
    assert log.read_text().splitlines() == wanted
    assert re.findall(r"^(\S.*?)  +\d+ min +\d+ s$", done.stdout, re.MULTILINE) == [
        *(f"make {one}" for one in wanted), "all of CI",
    ]  # fmt: skip
    assert done.returncode == (7 if failing else 0), done.stderr


def test_ci_takes_the_commands_of_the_readme_in_its_order() -> None:
    def commands(text: str) -> list[str]:
        return re.findall(r"\bmake (quickstart|test)\b", text)

    (block,) = (b for b in re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL) if "make" in b)
    assert commands((ROOT / ".ci/run").read_text()) == commands(block) == ["quickstart", "test"]


def test_what_tools_leave_behind_is_ignored_and_not_in_the_repository() -> None:
    check = ["git", "-C", str(ROOT), "check-ignore", "--no-index", *LEFT_BY_TOOLS]
    ignored = subprocess.run(check, capture_output=True, text=True, timeout=900).stdout.split()
    assert set(LEFT_BY_TOOLS) - set(ignored) == set()
    listed = ["git", "-C", str(ROOT), "ls-files", "--cached", "--ignored", "--exclude-standard"]
    assert subprocess.run(listed, capture_output=True, text=True, timeout=900, check=True).stdout == ""


# --- The layers: the drawing in the docs is the contract, and every folder says what belongs there


def contract() -> list[list[str]]:
    parser = configparser.ConfigParser()
    parser.read(ROOT / ".importlinter")
    lines = parser["importlinter:contract:layers"]["layers"].split("\n")
    return [[name.strip() for name in line.split("|")] for line in lines if line.strip()]


def drawing() -> list[list[str]]:
    text = (ROOT / "docs" / "architecture.md").read_text()
    block = text.split("## Layers", 1)[1].split("```")[1]
    found = []
    for line in block.strip().splitlines():
        names = re.split(r"\s{2,}", line)[0]  # what stands after two spaces explains
        found.append([name.strip() for name in names.split("|")])
    return found


def test_the_drawing_in_the_docs_is_the_contract() -> None:
    assert drawing() == contract()


def test_every_folder_has_a_line_that_says_what_belongs_there() -> None:
    for folder in (ROOT / "rl_vlm").rglob("__init__.py"):
        line = ast.get_docstring(ast.parse(folder.read_text())) or ""
        assert len(line) > 30 and line.endswith("."), f"{folder} says nothing about what belongs there"


def test_every_module_of_the_package_has_its_layer() -> None:
    package = ROOT / "rl_vlm"
    code = [path for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    modules = {path.stem for path in code if not path.name.startswith("_")}
    assert {name for layer in contract() for name in layer} == modules


# --- Shell scripts and Dockerfiles by their linters, which the extra `dev` installs


SCRIPTS = [*sorted((ROOT / "cluster").rglob("*.sbatch")), *sorted((ROOT / "cluster").rglob("*.sh")), ROOT / ".ci/run"]
DOCKERFILES = sorted((ROOT / "cluster/docker").glob("Dockerfile.*"))


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


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.suffix)
def test_hadolint_finds_nothing(dockerfile: Path) -> None:
    assert lint(tool("hadolint"), str(dockerfile)) == ""


# --- Notebooks are valid, their code parses, what they import exists, and they hold neither large outputs nor paths of a machine


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)


def cells(path: Path, kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def code(path: Path) -> ast.Module:
    """The code cells as one module; magics are left out."""
    lines = [line for cell in cells(path, "code") for line in cell.splitlines() if not line.startswith("%")]
    return ast.parse("\n".join(lines))


@notebooks
def test_what_is_imported_exists(path: Path) -> None:
    imported: set[tuple[str, str | None]] = set()
    for node in ast.walk(code(path)):
        if isinstance(node, ast.Import):
            imported |= {(alias.name, None) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and node.level == 0
            imported |= {(node.module, alias.name) for alias in node.names}
    assert imported
    for module, name in imported:
        package = module.partition(".")[0]
        assert importlib.util.find_spec(package) is not None, package
        if package == "rl_vlm" and name is not None:  # importing the others would take longer than all else here
            assert hasattr(importlib.import_module(module), name), f"{module}.{name}"


@notebooks
def test_names_are_defined_before_they_are_used(path: Path) -> None:
    assert lint(tool("ruff"), "check", "--isolated", "--select", "F", str(path)) == ""


# --- The pages for users of other systems: every key and log name on them exists, and their commands are understood


SLIME = ROOT / "docs" / "slime.md"
PAGES = [SLIME, ROOT / "docs" / "vlm_gym.md", ROOT / "docs" / "rl_vlm_f.md"]
RECIPE = ROOT / "configs" / "geo3k_qwen3vl_2b.yaml"
KEYS = {*keys_of(PolicyConfig), *keys_of(PreferenceConfig)}
_KEY = re.compile(r"((?:[a-z_]+\.)+[a-z_]+)(?:(?::\s*|=)([^`]+))?")


def quoted(page: Path) -> list[str]:
    """What stands in back quotes outside of code blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))


def keys_on(page: Path) -> Iterator[tuple[str, str | None]]:
    """The dotted keys of a configuration that a page names, and the value that it gives to each."""
    for text in quoted(page):
        match = _KEY.fullmatch(text)
        if match and match[1].partition(".")[0] in KEYS and match[2] != "value":
            yield match[1], match[2]


def commands(page: Path) -> list[list[str]]:
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_key_exists(page: Path) -> None:
    found = [key for key, _ in keys_on(page)]
    assert len(set(found)) > 20
    for key in found:
        if key.startswith("env.kwargs."):
            arguments = {*inspect.signature(Geo3kEnv).parameters, *inspect.signature(SlimeEnv).parameters}
            assert key.removeprefix("env.kwargs.") in arguments, key
        else:
            assert key in KEYS, key


def test_every_value_for_a_key_on_slimes_page_is_legal() -> None:
    given = [(key, value) for key, value in keys_on(SLIME) if value is not None]
    assert len(given) >= 10
    for key, value in given:
        load_config(RECIPE, [f"{key}={value}"])
