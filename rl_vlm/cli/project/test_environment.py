"""What must hold before anybody trains: run `pytest`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from environment import LampsEnv
from reward import score

from rl_vlm.envs.checking import check_environment

FILE = Path(__file__).with_name("environment.py")


def test_the_environment_is_sound() -> None:
    """What `rl-vlm envs check environment.py` tries: splits, ends, determinism, hostile answers."""
    report = check_environment(str(FILE), episodes=5, budget_s=5)
    assert report.ok, [finding for finding in report.findings if finding.status == "fail"]


def test_no_constant_answer_is_right_often() -> None:
    """A policy that ignores the picture must earn little."""
    env, answers = LampsEnv(), Counter[str]()
    for index in range(400):
        env.reset(options={"index": index, "split": "train"})
        answers[env.answer] += 1
    assert max(answers.values()) <= 0.35 * 400


@pytest.mark.parametrize("text", ["2", "", "<answer>3</answer>", "<answer>2", "<answer>2</answer><answer>3</answer>"])
def test_only_the_right_answer_is_rewarded(text: str) -> None:
    assert score("<answer>2</answer>", "2") == 1.0
    assert score(text, "2") == 0.0
