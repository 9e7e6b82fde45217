"""The tiny walker: what it is taught about grids, that it is asked as it was taught, and that it is not taught where to go."""

from __future__ import annotations

from collections import Counter

import numpy as np
from task_support import grid_of

from rl_vlm.zoo.gridwalk import environment
from rl_vlm.zoo.gridwalk.environment import MOVES, Difficulty, grid_item, parse_move
from rl_vlm.zoo.gridwalk.lesson import draw_walk, random_question

GRID = grid_of("..#.", ".A.O", "#O.G", "....")


# --- what is taught


def test_answers_about_a_grid_by_hand() -> None:
    rng = np.random.default_rng(0)
    found = {random_question(rng, GRID) for _ in range(3000)}
    by_question = dict(found)
    assert len(by_question) == len(found)  # one answer each
    expected = {
        "Row of agent?": "2", "Column of agent?": "2", "Row of goal?": "3", "Column of goal?": "4",
        "Where is goal?": "down right", "What is up?": "floor", "What is down?": "hole", "What is left?": "floor", "What is right?": "floor",
        "What is around?": "floor hole floor floor",
    }  # fmt: skip
    assert by_question == expected


def test_answers_about_neighbours_are_right_in_the_pixels() -> None:
    colours = {
        "goal": environment.GOAL,
        "wall": environment.WALL,
        "hole": environment.HOLE,
        "floor": (environment.BACKGROUND,) * 3,
    }
    rng = np.random.default_rng(1)
    seen: Counter[str] = Counter()
    for index in range(300):
        grid = grid_item(Difficulty(min_distance=1), "train", index)
        question, answer = random_question(rng, grid)
        if not question.startswith("What is "):
            continue
        asked = tuple(MOVES) if question == "What is around?" else (question[8:-1],)
        for move, kind in zip(asked, answer.split(), strict=True):
            seen[kind] += 1
            row, column = environment.neighbour(grid.agent, move)
            if 0 <= row < 4 and 0 <= column < 4:
                assert tuple(environment.render(grid)[16 * row + 8, 16 * column + 8]) == colours[kind]
            else:
                assert kind == "wall"
    assert set(seen) == set(colours)


def test_moves_are_random_whatever_is_drawn() -> None:
    rng = np.random.default_rng(2)
    moves: Counter[str] = Counter()
    by_bearing: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}  # whether the goal is painted above
    turns = 0
    for _ in range(4000):
        for role, (picture, text), reply in draw_walk(rng):
            turns += 1
            assert role == "user" and picture.shape == (64, 64, 3)
            if text in (environment.QUESTION, environment.EXPECTED):
                reply = parse_move(reply) or ""
                moves[reply] += 1
                agent, goal = (
                    np.argwhere((picture == colour).all(-1))[:, 0].mean()
                    for colour in (environment.AGENT, environment.GOAL)
                )
                by_bearing[bool(goal < agent - 8)][reply] += 1
    assert 0.4 < sum(moves.values()) / turns < 0.7
    assert all(abs(count / sum(moves.values()) - 0.25) < 0.03 for count in moves.values())
    for counts in by_bearing.values():  # going up is as likely when the goal is above
        assert abs(counts["up"] / sum(counts.values()) - 0.25) < 0.04


def test_no_test_grid_is_shown() -> None:
    rng = np.random.default_rng(4)
    shown = {picture.tobytes() for _ in range(600) for _, (picture, _), _ in draw_walk(rng)}
    test = {environment.render(grid_item(Difficulty(), "test", index)).tobytes() for index in range(512)}
    assert len(shown) > 1000 and len(test) > 500 and not shown & test


# --- how it is asked
