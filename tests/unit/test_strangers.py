"""tests/fixtures/strangers: ten small environments as other people write them, and what benchmarks/strangers.py makes of them."""

from pathlib import Path

import pytest

from rl_vlm.envs.checking import check_environment
from rl_vlm.envs.registry import make

ROOT = Path(__file__).parents[2]
STRANGERS = ROOT / "tests" / "fixtures" / "strangers"
CALL = '{"name": "open_curtain", "arguments": {"side": "left"}}'
# What they can be answered with, turn by turn.
ANSWERS = {
    "bars": ({"Answer: 1", "Answer: 2", "Answer: 3"},),
    "brighter_photo": ({"first", "second"},),
    "cross": ({"yes", "no"},),
    "curtain": (
        {f"<tool_call>{CALL}</tool_call>", f"<tool_call>{CALL.replace('left', 'right')}</tool_call>"},
        {"on", "off"},
    ),
    "doors": ({f"open {number}" for number in range(1, 5)},),
    "mouse": ({f"row {row}, column {column}" for row in (1, 2) for column in (1, 2)},),
    "paint": ({f"I choose {paint}." for paint in ("red", "blue", "white", "yellow")},),
    "quiz": ({"A", "B", "C"},),
    "traffic": ({f'{{"light": "{light}"}}' for light in ("red", "yellow", "green")},),
    "weather": ({f"<weather>{weather}</weather>" for weather in ("sunny", "cloudy", "night")},),
}


def path_of(name: str) -> str:
    return str(STRANGERS / f"{name}.py")


def opened(name: str, index: int, split: str = "train"):
    env = make(path_of(name))
    env.reset(options={"index": index, "split": split})
    return env


@pytest.mark.acceptance
@pytest.mark.parametrize("name", ANSWERS)
def test_it_is_a_sound_environment(name: str) -> None:
    report = check_environment(path_of(name), episodes=8, budget_s=0.5, answers=sorted(ANSWERS[name][0]))
    # One text that answers both of the curtain's turns is nothing that the check could say.
    unpaid = ["reward"] if len(ANSWERS[name]) > 1 else []
    assert report.ok and report.image is not None
    assert [finding.name for finding in report.findings if finding.status != "ok"] == unpaid


@pytest.mark.parametrize("name", ANSWERS)
def test_right_answers_are_paid_and_all_answers_occur(name: str) -> None:
    said: list[set[str]] = [set() for _ in ANSWERS[name]]
    for index in range(32):
        env = opened(name, index, ("train", "test")[index % 2])
        for turn, texts in enumerate(said):
            texts.add(text := env.right())
            _, reward, terminated, _, info = env.step(text)
            last = turn == len(said) - 1
            assert (reward, terminated, info["well_formed"]) == (float(last), last, True)
        assert info["correct"] is True
    assert tuple(said) == ANSWERS[name]
