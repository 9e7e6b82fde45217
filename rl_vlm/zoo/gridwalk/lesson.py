"""Lessons of the tiny model for GridWalk-v0: walks over grids, with questions about the cells.

Each turn shows a picture. Questions about perception (rows, columns, the content of a cell) have right answers. The
reply to "Which way?" describes rightly the cells around the agent and the side of the goal. A random move follows:
reinforcement learning has to find out which move is good.
"""

from __future__ import annotations

import numpy as np

from rl_vlm.zoo.gridwalk import grids
from rl_vlm.zoo.gridwalk.environment import EXPECTED, QUESTION
from rl_vlm.zoo.gridwalk.grids import MOVES, Grid
from rl_vlm.zoo.tiny.teach import Draw, Exchange

SIZES = (3, 4)  # of the grids, in cells per side
MAX_TURNS = 8  # as many as episodes of configs/gridwalk_tiny.yaml have: the model sees nothing in later ones
MOVE_SHARE = 0.5  # of the turns

CORPUS = (
    " ".join([QUESTION] * 4),
    EXPECTED,
    "up\ndown\nleft\nright\n" * 2,
    "floor wall hole goal: up right: left\nwall floor goal hole: down left: up\nhole goal floor wall: up: right\n"
    "goal hole wall floor: down: down\n" * 2,
    "What is up? What is down? What is left? What is right? What is around?",
    "Where is goal? up right, down right, down left, up left",
    "Row of agent? Row of goal? Column of agent? Column of goal?",
)


def draw_walk(rng: np.random.Generator) -> list[Exchange]:
    """One conversation, a picture in each turn."""
    turns: list[Exchange] = []
    grid = _fresh(rng)
    for _ in range(int(rng.integers(1, MAX_TURNS + 1))):
        picture = grids.render(grid)
        if rng.random() < MOVE_SHARE:
            move = tuple(MOVES)[rng.integers(len(MOVES))]
            question = QUESTION if rng.random() < 0.95 else EXPECTED
            turns.append(Exchange("user", (picture, question), f"{described(grid)}: {move}"))
            grid = grid.moved(move)
            over = grid.agent == grid.goal or grid.agent in grid.holes
        else:
            question, answer = random_question(rng, grid)
            turns.append(Exchange("user", (picture, question), answer))
            over = rng.random() < 0.8
        if over:
            grid = _fresh(rng)
    return turns


def random_question(rng: np.random.Generator, grid: Grid) -> tuple[str, str]:
    draw = rng.random()
    if draw < 0.15:
        what, cell = ("agent", grid.agent) if rng.random() < 0.5 else ("goal", grid.goal)
        axis = int(rng.integers(2))
        return f"{('Row', 'Column')[axis]} of {what}?", str(cell[axis] + 1)
    if draw < 0.35:
        return "Where is goal?", bearing(grid)
    around = neighbours(grid)
    if draw < 0.7:
        return "What is around?", " ".join(around.values())
    kinds = sorted(set(around.values()))
    kind = kinds[rng.integers(len(kinds))]  # each kind that is there equally often
    moves = [move for move in MOVES if around[move] == kind]
    return f"What is {moves[rng.integers(len(moves))]}?", kind


def described(grid: Grid) -> str:
    """The description before a move: "floor wall floor hole: up right"."""
    return f"{' '.join(neighbours(grid).values())}: {bearing(grid)}"


def neighbours(grid: Grid) -> dict[str, str]:
    """What the cells around the agent hold, by the move that leads there."""
    return {move: kind_of(grid, grids.neighbour(grid.agent, move)) for move in MOVES}


def bearing(grid: Grid) -> str:
    """On which side of the agent the goal lies, whatever is between them: "up", "down left", ..."""
    rows, columns = (there - here for there, here in zip(grid.goal, grid.agent, strict=True))
    vertical = ["up"] if rows < 0 else ["down"] if rows > 0 else []
    horizontal = ["left"] if columns < 0 else ["right"] if columns > 0 else []
    return " ".join(vertical + horizontal)


def kind_of(grid: Grid, cell: grids.Cell) -> str:
    if cell == grid.goal:
        return "goal"
    if cell in grid.holes:
        return "hole"
    return "wall" if grid.blocked(cell) else "floor"


def _fresh(rng: np.random.Generator) -> Grid:
    """A random grid of the train split; it need not be solvable."""
    while True:
        size = SIZES[rng.integers(len(SIZES))]
        most = size * size // 5
        grid = grids.random_grid(rng, size, int(rng.integers(most + 1)), int(rng.integers(most + 1)))
        if grid.split() == "train":
            return grid


def drawer(seed: int) -> Draw:
    rng = np.random.default_rng([seed, 3])
    return lambda: draw_walk(rng)
