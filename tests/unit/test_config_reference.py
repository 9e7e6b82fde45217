"""The reference of the configuration is complete, and its page is the one that the code writes."""

import re
from pathlib import Path
from typing import get_args

import click
import pytest
import typer

from rl_vlm.cli.app import app, run
from rl_vlm.cli.errors import documented_errors
from rl_vlm.cli.reference import Page
from rl_vlm.config.reference import KINDS, reference
from rl_vlm.config.section import keys_of
from rl_vlm.http.gate import STATUSES
from rl_vlm.http.reference import _BODIES

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_has_a_meaning(kind: str) -> None:
    known = {key.name: key for key in reference(KINDS[kind])}
    assert not [name for name, key in known.items() if not key.meaning]
    assert {name.partition(".")[0] for name in known} == KINDS[kind].model_fields.keys()
    assert known.keys() <= set(keys_of(KINDS[kind]))


@pytest.mark.parametrize("name", get_args(Page))
def test_the_pages_are_current(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "--markdown", "--page", name]) == 0
    command = f"`rl-vlm config --markdown --page {name} > docs/{name}.md`"
    assert (ROOT / f"docs/{name}.md").read_text() == capsys.readouterr().out, f"run {command}"


def test_the_page_of_the_http_api_has_all_of_it() -> None:
    keys = [key for body in _BODIES.values() for key in reference(body)]
    assert {key.name for key in keys if not key.meaning} == {"ignored_fields"}  # which clients do not send
    source = "".join(path.read_text() for path in (ROOT / "rl_vlm/http").glob("*.py") if path.stem != "env_server")
    raised = {int(status) for status in re.findall(r"RequestError\(\s*(\d{3})", source)}
    assert {400, 401, 429, 504} <= raised <= STATUSES.keys()


def test_every_error_says_when_it_is_raised_and_what_to_do() -> None:
    known = list(documented_errors())
    assert {"UserInputError", "EnvCrashError", "SweepError", "ToolCallError"} <= {one.name for one in known}
    assert not [one.name for one in known if not (one.when and one.remedy)]


def test_the_page_of_commands_has_all_of_them() -> None:
    page = (ROOT / "docs/commands.md").read_text()

    def check(name: str, command: click.Command) -> None:
        _, found, section = page.partition(f"## `{name}`\n")
        assert found, f"{name}: run `make docs`"
        section = section.partition("\n## ")[0].partition("\n### ")[0]
        for option in (opt for one in command.params for opt in one.opts if opt.startswith("--")):
            assert option in section, f"{name} {option}: run `make docs`"
        for inner, one in getattr(command, "commands", {}).items():
            check(f"{name} {inner}", one)

    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        check(f"rl-vlm {name}", command)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "rollout.group_size"]) == 0
    assert capsys.readouterr().out == (
        "rollout.group_size: 8\n    int >= 1\n    Episodes per group, which start from the same item.\n"
    )
    assert run(["config", "rolout"]) == 2
    assert "rolout" in capsys.readouterr().err
