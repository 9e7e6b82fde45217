"""Shell scripts and Dockerfiles by their linters, which the extra `dev` installs."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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
