"""What lies beside the code: lint after a run, CI's steps, hooks, templates, ignored folders."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
IGNORED = [line for line in (ROOT / ".gitignore").read_text().split() if "*" not in line]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
LEFT_BY_TOOLS = (
    ".venv/x", ".venv-3.12/x", "runs/quickstart/config.yaml", ".hypothesis/x", ".schemathesis/x", ".pytest_cache/x",
    ".mypy_cache/x", ".ruff_cache/x", "rl_vlm/__pycache__/x.pyc", "build/x", "dist/x.whl", "rl_vlm.egg-info/x",
    ".coverage", "htmlcov/x", ".DS_Store", ".idea/x", ".vscode/x", "core.1234",
)  # fmt: skip


def test_imports_are_sorted_alike_whatever_folders_a_run_leaves(tmp_path: Path) -> None:
    for folder in ("rl_vlm", "tests", "benchmarks", "examples"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for name in IGNORED:
        (tmp_path / name).mkdir(exist_ok=True)
    ruff = [sys.executable, "-m", "ruff", "check", "--select", "I", "--no-cache", "."]
    done = subprocess.run(ruff, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout


def test_no_two_test_files_have_one_name() -> None:
    """`make acceptance` collects all folders at once, and pytest refuses a second module of a name."""
    names = [path.name for path in (ROOT / "tests").rglob("*.py") if path.name != "conftest.py"]
    assert sorted(names) == sorted(set(names))


def test_make_lets_python_keep_bytecode() -> None:
    ours = {
        name: value for name, value in os.environ.items() if not name.startswith("MAKE")
    }  # these tests run under make
    shown = subprocess.run(
        ["make", "-s", "-f", ROOT / "Makefile", "-f", "-", "bytecode"],
        input="bytecode:\n\t@echo value=$$PYTHONDONTWRITEBYTECODE\n",
        env={**ours, "PYTHONDONTWRITEBYTECODE": "1"}, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert shown.stdout == "value=\n", shown.stderr


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


def test_a_release_is_audited_built_and_has_its_bills_of_materials() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    assert workflow[True] == {"push": {"tags": ["v*"]}}
    commands = [step["run"] for step in workflow["jobs"]["release"]["steps"] if "run" in step]
    assert commands[0] == "make audit sbom dist"
    assert {"audit", "sbom", "dist"} <= TARGETS
    assert "dist/* build/sbom/*.cdx.json" in commands[-1]


def test_the_hosted_workflow_runs_the_ci_script_on_what_the_package_supports() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands[-1] == ".ci/run"
    assert os.access(ROOT / ".ci/run", os.X_OK)
    (setup,) = (step for step in job["steps"] if "setup-python" in step.get("uses", ""))
    assert set(setup["with"]["python-version"].split()) == {"3.11", "3.12"}
    # YAML 1.1 reads the key `on` as true.
    assert {"push", "pull_request"} <= set(workflow[True])


def test_the_commit_hook_runs_lint() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    (hook,) = repository["hooks"]
    assert (repository["repo"], hook["language"], hook["pass_filenames"]) == ("local", "system", False)
    command, target = hook["entry"].split()
    assert command == "make" and target in TARGETS


@pytest.mark.parametrize("template", sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")), ids=lambda p: p.stem)
def test_issue_forms_have_what_a_form_needs(template: Path) -> None:
    form = yaml.safe_load(template.read_text())
    assert {"name", "description", "body"} <= form.keys()
    ids = [field["id"] for field in form["body"]]
    assert len(ids) == len(set(ids))
    assert all(field["type"] in ("textarea", "input") and field["attributes"]["label"] for field in form["body"])


def test_the_editor_writes_lines_as_long_as_the_formatter_does() -> None:
    settings = ConfigParser()
    settings.read_string("[top]\n" + (ROOT / ".editorconfig").read_text())
    (length,) = re.findall(r"^line-length = (\d+)", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert settings["*.py"]["max_line_length"] == length
    assert settings["Makefile"]["indent_style"] == "tab"


def test_the_changelog_has_the_version_of_the_package() -> None:
    (version,) = re.findall(r'^version = "([^"]+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased" and version in headings


def test_what_tools_leave_behind_is_ignored_and_not_in_the_repository() -> None:
    check = ["git", "-C", str(ROOT), "check-ignore", "--no-index", *LEFT_BY_TOOLS]
    ignored = subprocess.run(check, capture_output=True, text=True, timeout=900).stdout.split()
    assert set(LEFT_BY_TOOLS) - set(ignored) == set()
    listed = ["git", "-C", str(ROOT), "ls-files", "--cached", "--ignored", "--exclude-standard"]
    assert subprocess.run(listed, capture_output=True, text=True, timeout=900, check=True).stdout == ""


@pytest.mark.parametrize(
    ("output", "status", "said"),
    [
        ("No known vulnerabilities found", 0, "No known vulnerabilities found"),
        ("requests.exceptions.ConnectionError: Max retries exceeded", 2, "nothing was audited"),
        ("idna 3.4 GHSA-jjg7-2v4v-x38h 3.7", 2, "GHSA-jjg7-2v4v-x38h"),
    ],
)
def test_an_audit_that_reached_no_advisories_fails_and_says_so(
    tmp_path: Path, output: str, status: int, said: str
) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    _executable(tmp_path / "bin/uvx", f'echo "{output}"; exit {min(status, 1)}')
    command = ["make", "--silent", "--assume-old=install", "audit", f"BIN={tmp_path / 'bin'}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert (done.returncode, said in done.stdout) == (status, True), done.stdout + done.stderr
    assert ("nothing was audited" in done.stdout) == ("ConnectionError" in output)
