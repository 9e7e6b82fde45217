"""GridWalk-v0: the rules, which grids are drawn up, what is shown and paid, and that train and test grids never meet."""

from __future__ import annotations

import itertools

import pytest
from task_support import grid_of

from rl_vlm.types import EncodedImage, Observation
from rl_vlm.zoo.gridwalk import grids
from rl_vlm.zoo.gridwalk.environment import GridWalkEnv
from rl_vlm.zoo.gridwalk.grids import MOVES, Difficulty, Grid, grid_item, picture_of

HAND_MADE = grid_of(
    "A.#",
    ".O.",
    "..G",
)


def opened(grid: Grid = HAND_MADE, **kwargs: object) -> GridWalkEnv:
    """An environment that stands at a hand-made grid."""
    env = GridWalkEnv(3, walls=1, holes=1, **kwargs)  # type: ignore[arg-type]
    env.reset(options={"index": 0})
    env._grid = grid
    return env


def picture(observation: Observation) -> EncodedImage:
    (image,) = observation.messages[-1].images
    assert isinstance(image, EncodedImage)
    return image


def shortest_by_enumeration(grid: Grid, limit: int) -> int | None:
    """The length of a shortest walk, by applying the rules to a frontier of states: independent of `distances`."""
    states = {grid}
    for steps in range(limit + 1):
        if any(state.agent == state.goal for state in states):
            return steps
        states = {s.moved(move) for s in states for move in MOVES}
        states = {s for s in states if s.agent not in s.holes}
    return None


# --- rules


def test_walls_and_the_border_stop_the_agent() -> None:
    for move, place in {"up": (0, 0), "left": (0, 0), "right": (0, 1), "down": (1, 0)}.items():
        assert HAND_MADE.moved(move).agent == place
    assert HAND_MADE.moved("right").moved("right").agent == (0, 1)  # the wall at (0, 2)


@pytest.mark.parametrize(
    ("moves", "reward", "ended", "outcome"),
    [
        (["down", "down", "right", "right"], 1.0, (True, False), "goal"),
        (["right", "down"], 0.0, (True, False), "hole"),
        (["up"] * 5, 0.0, (False, True), "turns"),
    ],
)
def test_goal_holes_and_the_last_turn_end_the_walk(
    moves: list[str], reward: float, ended: tuple[bool, bool], outcome: str
) -> None:
    env = opened(max_turns=5)
    for move in moves[:-1]:
        observation, *before, info = env.step(move)
        assert (before, info["outcome"]) == ([0.0, False, False], "walking")
        assert [(message.role, message.text) for message in observation.messages] == [("user", "Which way?")]
    observation, paid, *flags, info = env.step(moves[-1])
    assert (paid, tuple(flags), observation.messages) == (reward, ended, ())
    assert (info["success"], info["outcome"], info["steps"]) == (outcome == "goal", outcome, len(moves))


@pytest.mark.parametrize("text", ["", "north", "up!", "up it goes", "down,up", "<answer>up</answer>", "u p", "up\x00"])
def test_what_is_no_move_uses_a_turn_and_is_told_what_is_expected(text: str) -> None:
    env = opened(max_turns=3)
    before = picture_of(HAND_MADE)
    observation, reward, terminated, truncated, info = env.step(text)
    assert (reward, terminated, truncated, info["well_formed"], info["steps"]) == (0.0, False, False, False, 1)
    assert observation.messages[0].text == "End with up, down, left or right."
    assert picture(observation) == before
    observation, *_, info = env.step("down")
    assert (observation.messages[0].text, info["well_formed"]) == ("Which way?", True)
    assert env.step(text)[3]  # the third of three turns


# --- grids


@pytest.mark.parametrize("size", [3, 4, 5, 6])
def test_every_grid_can_be_solved_and_is_as_difficult_as_asked_for(size: int) -> None:
    difficulty = Difficulty(size, size - 2, size - 2, 3, 8)
    for split, count in (("train", 400), ("test", 100)):
        for index in range(count):
            grid = grid_item(difficulty, split, index)  # type: ignore[arg-type]
            shortest = shortest_by_enumeration(grid, 8)
            assert shortest is not None and shortest >= 3
            assert shortest == grid.distances()[grid.agent]
            if index < 5:
                env = GridWalkEnv(size, walls=size - 2, holes=size - 2)
                assert env.reset(options={"index": index, "split": split})[1]["shortest_path"] == shortest
            cells = [grid.agent, grid.goal, *grid.walls, *grid.holes]
            assert len(set(cells)) == len(cells) == 2 + 2 * (size - 2)


def test_the_map_decides_the_split_whatever_the_agent_does() -> None:
    for split in ("train", "test"):
        for index in range(50):
            grid = grid_item(Difficulty(), split, index)  # type: ignore[arg-type]
            assert {grid.split(), *(grid.moved(move).split() for move in MOVES)} == {split}


# --- pictures


@pytest.mark.parametrize(("size", "image_size"), [(3, 64), (4, 64), (5, 64), (6, 64), (6, 200)])
def test_every_kind_of_cell_can_be_told_from_every_other(size: int, image_size: int) -> None:
    difficulty = Difficulty(size, size - 2, size - 2)
    for index in range(20):
        grid = grid_item(difficulty, "train", index)
        pixels = grids.render(grid, image_size)
        assert pixels.shape == (image_size, image_size, 3)
        edges = [round(k * image_size / size) for k in range(size + 1)]
        for row, column in itertools.product(range(size), repeat=2):
            cell = pixels[edges[row] : edges[row + 1], edges[column] : edges[column + 1]]
            colour = tuple(int(v) for v in cell[cell.shape[0] // 2, cell.shape[1] // 2])
            expected = {grid.agent: grids.AGENT, grid.goal: grids.GOAL}
            expected |= dict.fromkeys(grid.walls, grids.WALL) | dict.fromkeys(grid.holes, grids.HOLE)
            assert colour == expected.get((row, column), (grids.BACKGROUND,) * 3)
            assert (cell == colour).all(-1).mean() > 0.3
