"""The reference of the configuration is complete, and its page is the one that the code writes."""

from pathlib import Path

import click
import pytest
import typer

from rl_vlm.cli.app import app, run
from rl_vlm.config.reference import KINDS, page, reference
from rl_vlm.config.section import keys_of, section_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_has_a_meaning(kind: str) -> None:
    known = {key.name: key for key in reference(KINDS[kind])}
    assert not [name for name, key in known.items() if not key.meaning]
    assert {name.partition(".")[0] for name in known} == KINDS[kind].model_fields.keys()
    assert known.keys() <= set(keys_of(KINDS[kind]))


def test_keys_as_a_reader_knows_them() -> None:
    known = {key.name: key for key in reference(KINDS["policy"])}
    assert known["model.lora.rank"][1:3] == ("int >= 1, <= 512", "16")
    assert known["serving.engine"][1:3] == ("auto | transformers | vllm", '"auto"')
    assert known["model.adapter"].type == "path | null"
    assert known["rollout.group_size"].meaning == "Episodes per group, which start from the same item."
    # A comment above the key, and a key that a kind declares anew.
    assert known["learner.lr_schedule"].meaning.startswith("linear: falls to")
    assert section_of(KINDS["preference"].model_fields["env"].annotation)
    assert "env.mixture" not in {key.name for key in reference(KINDS["preference"])}


def test_the_page_is_current() -> None:
    assert (ROOT / "docs/configuration.md").read_text() == page() + "\n", (
        "run `rl-vlm config --markdown > docs/configuration.md`"
    )


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
