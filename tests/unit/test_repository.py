"""What lies beside the code: lint after a run, CI's steps, hooks, templates, ignored folders."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


LEFT_BY_TOOLS = (
    ".venv/x", ".venv-3.12/x", "runs/quickstart/config.yaml", ".hypothesis/x", ".schemathesis/x", ".pytest_cache/x",
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


@pytest.mark.parametrize("other", ["installed", "in pyenv only", "missing"])
def test_ci_walks_the_readme_and_then_the_other_python(tmp_path: Path, other: str) -> None:
    clone, tools, log = tmp_path / "clone", tmp_path / "bin", tmp_path / "log"
    (clone / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci/run", clone / ".ci/run")
    _executable(tools / "make", f'echo "$@" >> {log}')
    _executable(clone / ".venv/bin/python", "echo 3.11")
    for name in ("python3.11", "python3.12"):
        _executable(tools / name, f"exit {0 if other == 'installed' else 127}")
    pyenv = tmp_path / "pyenv"
    if other == "in pyenv only":
        _executable(pyenv / "versions/3.12.9/bin/python", "exit 0")
    environment = {**os.environ, "PATH": f"{tools}:/usr/bin:/bin", "PYENV_ROOT": str(pyenv)}
    done = subprocess.run(
        [clone / ".ci/run"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    python = {"installed": "python3.12", "in pyenv only": f"{pyenv}/versions/3.12.9/bin/python"}.get(other)
    expected = ["quickstart", "test", *([f"unit VENV=.venv-3.12 PYTHON={python}"] if python else [])]
    assert log.read_text().splitlines() == expected
    assert ("Python 3.12 is not installed" in done.stdout) == (python is None)


def test_ci_takes_the_commands_of_the_readme_in_its_order() -> None:
    def commands(text: str) -> list[str]:
        return re.findall(r"^make ([a-z]+)", text, re.MULTILINE)

    (block,) = (b for b in re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL) if "make" in b)
    assert commands((ROOT / ".ci/run").read_text()) == commands(block) == ["quickstart", "test"]


def test_what_tools_leave_behind_is_ignored_and_not_in_the_repository() -> None:
    check = ["git", "-C", str(ROOT), "check-ignore", "--no-index", *LEFT_BY_TOOLS]
    ignored = subprocess.run(check, capture_output=True, text=True, timeout=900).stdout.split()
    assert set(LEFT_BY_TOOLS) - set(ignored) == set()
    listed = ["git", "-C", str(ROOT), "ls-files", "--cached", "--ignored", "--exclude-standard"]
    assert subprocess.run(listed, capture_output=True, text=True, timeout=900, check=True).stdout == ""
