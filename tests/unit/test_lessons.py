"""What the tiny model of GridWalk-v0 is taught: to see rightly, and to act at random whatever it sees. Runs of all recipes prove it too."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from task_support import grid_of

from rl_vlm.zoo.gridwalk.environment import EXPECTED, QUESTION, parse_move
from rl_vlm.zoo.gridwalk.grids import AGENT, GOAL
from rl_vlm.zoo.gridwalk.lesson import draw_walk, random_question

pytestmark = pytest.mark.slow


STANDING = grid_of("..#.", ".A.O", "#O.G", "....")


def test_answers_about_a_grid_by_hand() -> None:
    rng = np.random.default_rng(0)
    found = {random_question(rng, STANDING) for _ in range(3000)}
    by_question = dict(found)
    assert len(by_question) == len(found)  # one answer each
    expected = {
        "Row of agent?": "2", "Column of agent?": "2", "Row of goal?": "3", "Column of goal?": "4",
        "Where is goal?": "down right", "What is up?": "floor", "What is down?": "hole", "What is left?": "floor", "What is right?": "floor",
        "What is around?": "floor hole floor floor",
    }  # fmt: skip
    assert by_question == expected


def test_moves_are_random_whatever_is_drawn() -> None:
    rng = np.random.default_rng(2)
    moves: Counter[str] = Counter()
    by_bearing: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}  # whether the goal is painted above
    turns = 0
    for _ in range(1500):
        for role, (picture, text), reply in draw_walk(rng):
            turns += 1
            assert role == "user" and picture.shape == (64, 64, 3)
            if text in (QUESTION, EXPECTED):
                reply = parse_move(reply) or ""
                moves[reply] += 1
                agent, goal = (np.argwhere((picture == one).all(-1))[:, 0].mean() for one in (AGENT, GOAL))
                by_bearing[bool(goal < agent - 8)][reply] += 1
    assert 0.4 < sum(moves.values()) / turns < 0.7
    assert all(abs(count / sum(moves.values()) - 0.25) < 0.03 for count in moves.values())
    for counts in by_bearing.values():  # going up is as likely when the goal is above
        assert abs(counts["up"] / sum(counts.values()) - 0.25) < 0.04
