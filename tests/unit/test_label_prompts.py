"""Prompts: every task of RL-VLM-F has a goal, users bring their own, and mistakes are named."""

from pathlib import Path

import pytest
from tables import table

from rl_vlm.labelling.labeller import TASKS, Templates, load_prompts, task_prompts
from rl_vlm.types import UserInputError

TABLES = table("label_tasks")


@pytest.mark.parametrize(("original", "ours"), TABLES["names_of_the_original_lead_to_prompts"])
def test_names_of_the_original_lead_to_prompts(original: str, ours: str) -> None:
    prompts = task_prompts(original)
    assert prompts.name == ours
    assert prompts.goal.startswith("to ") and prompts.description.endswith(".")


def test_every_template_can_be_filled() -> None:
    for name in TASKS:
        prompts = task_prompts(name)
        templates = prompts.templates
        for text in (templates.describe, templates.summarise, templates.decide, templates.score_decide):
            filled = prompts.fill(text, "an answer with {braces} and {goal}")
            assert prompts.goal in filled
        assert "an answer with {braces} and {goal}" in prompts.fill(
            templates.summarise, "an answer with {braces} and {goal}"
        )


def test_an_unknown_task_names_the_nearest_one() -> None:
    with pytest.raises(UserInputError, match="drawer-open"):
        task_prompts("metaworld_drawr-open-v2")
    with pytest.raises(UserInputError, match="cartpole"):
        task_prompts("zzz")


def test_users_bring_goals_and_templates(tmp_path: Path) -> None:
    file = tmp_path / "prompts.yaml"
    file.write_text(
        "press: to press the button\n"
        "drawer-open:\n  goal: to close the drawer\n  description: Closed.\n"
        "  templates: {decide: 'Which is nearer to the goal {goal}? 0, 1 or -1.'}\n"
    )
    assert task_prompts("press", file).goal == "to press the button"
    own = task_prompts("metaworld_drawer-open-v2", file)
    assert (own.goal, own.description) == ("to close the drawer", "Closed.")
    assert own.fill(own.templates.decide) == "Which is nearer to the goal to close the drawer? 0, 1 or -1."
    assert own.templates.first == Templates().first
    assert task_prompts("soccer", file).name == "soccer"


@pytest.mark.parametrize(("text", "message"), table("refused_settings")["label_prompts"])
def test_what_is_wrong_in_a_file_is_said(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "prompts.yaml"
    file.write_text(text)
    with pytest.raises(UserInputError, match=message.replace("{", "\\{")):
        load_prompts(file)


def test_a_file_may_name_a_task_as_the_original_does(tmp_path: Path) -> None:
    """Silently asking our own question instead would be the worst of answers."""
    file = tmp_path / "prompts.yaml"
    file.write_text("metaworld_soccer-v2: to kick the ball into the goal, in my own words\n")
    for task in ("metaworld/soccer-v3", "metaworld_soccer-v2", "soccer"):
        assert "in my own words" in task_prompts(task, file).goal
