"""The tiny geometer: what it is taught about figures, that it is asked as it was taught, and that it is not taught the answer."""

from __future__ import annotations

import re
from collections import Counter
from itertools import pairwise
from random import Random

import numpy as np
import pytest

from rl_vlm.envs.tools import parse_tool_call
from rl_vlm.rewards.math import extract_boxed
from rl_vlm.zoo.geo3k.drawn import drawn_problem
from rl_vlm.zoo.geo3k.lesson import GUESSES, FigureDialogues, boxed, pixels_of
from rl_vlm.zoo.tiny.teach import Exchange


@pytest.fixture(scope="module")
def dialogues() -> list[list[Exchange]]:
    teacher, rng = FigureDialogues(0), Random(0)
    return [teacher.draw(rng) for _ in range(600)]


# --- what is taught


def test_the_guess_is_random_whatever_the_figure_holds_and_the_numbers_before_it_are_right(
    dialogues: list[list[Exchange]],
) -> None:
    right: list[bool] = []
    guesses: Counter[int] = Counter()
    for dialogue in dialogues:
        reply = dialogue[0].reply
        one, other, guess = map(int, re.match(r"(\d+) (\d+): (\d+) ", reply).groups())  # type: ignore[union-attr]
        assert one <= other < 160 and one + other < 180
        right.append(one + other + guess == 180)
        guesses[guess] += 1
        call = parse_tool_call(reply)
        assert (call.arguments["answer"] if call else extract_boxed(reply)) == str(guess)
    assert abs(np.mean(right) - 1 / 7) < 0.05
    assert set(guesses) == set(GUESSES)


def test_replies_to_calls_are_those_of_the_environment_and_a_right_call_is_boxed(
    dialogues: list[list[Exchange]],
) -> None:
    confirmed = tried_again = 0
    for dialogue in dialogues:
        for (_, _, reply), answered in pairwise(dialogue):
            role, text, following = answered.role, answered.text, answered.reply
            call = parse_tool_call(reply)
            assert call is not None and role == "tool"
            guess = call.arguments["answer"]
            if text.startswith("Score: 1"):
                assert following == boxed(guess)
                confirmed += 1
            else:
                assert text.startswith(f"Score: 0. The answer {guess} is wrong.")
                assert f": {guess} " not in following
                assert parse_tool_call(following) is None or "last one" not in text
                tried_again += 1
        assert parse_tool_call(dialogue[-1].reply) is None
    assert confirmed > 20 and tried_again > 40


def test_no_test_picture_is_shown(dialogues: list[list[Exchange]]) -> None:
    shown = {dialogue[0].parts[0].tobytes() for dialogue in dialogues}
    test = {pixels_of(drawn_problem((1,), 20, 64, "test", index)[1]).tobytes() for index in range(100)}
    assert len(shown) > 580 and len(test) > 95 and not shown & test


# --- how it is asked
