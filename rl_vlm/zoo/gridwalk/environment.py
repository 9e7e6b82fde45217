"""GridWalk-v0: walk over a drawn grid to the goal, one move a turn; the reward comes at the end.

A small task in which credit matters: several turns decide about one number, and states come back.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Literal

import numpy as np
from PIL import Image
from pydantic import Field

from rl_vlm.envs.base import Count, EpisodeEnv, Info, Item, Reply
from rl_vlm.types import EncodedImage, Observation, Split, UserInputError
from rl_vlm.zoo.drawing import BACKGROUND, split_of_hash, stable_rng

Cell = tuple[int, int]  # row and column, from the top left

IMAGE_SIZE = 64
MIN_SIZE, MAX_SIZE = 3, 6
MOVES: dict[str, Cell] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}

# The first message of prompt "full"; the question follows.
RULES = (
    "You are the red disc. Walk to the green square. White cells are walls, which stop you; black discs are holes: if "
    "you step on one, the game is lost. In each of at most {turns} turns end your answer with one word: up, down, left "
    "or right. "
)
QUESTION = "Which way?"
EXPECTED = "End with up, down, left or right."

LINE = (104, 104, 104)
AGENT = (235, 40, 30)
GOAL = (40, 220, 60)
WALL = (250, 250, 250)
HOLE = (0, 0, 0)

_MAX_DRAWS = 20_000  # of one grid; the rarest settings that exist need a few hundred


@dataclass(frozen=True, slots=True)
class Grid:
    """A state of the walk on `size` × `size` cells."""

    size: int
    agent: Cell
    goal: Cell
    walls: frozenset[Cell] = frozenset()
    holes: frozenset[Cell] = frozenset()

    def blocked(self, cell: Cell) -> bool:
        """Whether a step into the cell leaves the agent where it is: a wall, or outside."""
        return cell in self.walls or not (0 <= cell[0] < self.size and 0 <= cell[1] < self.size)

    def moved(self, move: str) -> Grid:
        cell = neighbour(self.agent, move)
        return self if self.blocked(cell) else replace(self, agent=cell)

    def distances(self) -> dict[Cell, int]:
        """Steps to the goal on a shortest path without holes, from every cell that has one (breadth-first search)."""
        found = {self.goal: 0}
        front = deque([self.goal])
        while front:
            cell = front.popleft()
            for move in MOVES:
                near = neighbour(cell, move)
                if near not in found and near not in self.holes and not self.blocked(near):
                    found[near] = found[cell] + 1
                    front.append(near)
        return found

    def split(self) -> Split:
        """By the hash of everything but the agent: no picture of a test grid is ever trained on."""
        parts = (self.size, self.goal, sorted(self.walls), sorted(self.holes))
        return split_of_hash(hashlib.blake2b(repr(parts).encode(), digest_size=16).digest()[0])


def neighbour(cell: Cell, move: str) -> Cell:
    rows, columns = MOVES[move]
    return cell[0] + rows, cell[1] + columns


def random_grid(rng: np.random.Generator, size: int, walls: int, holes: int) -> Grid:
    """Agent, goal, walls and holes in different cells, uniformly at random; it need not be solvable."""
    cells = [(int(number) // size, int(number) % size) for number in rng.permutation(size * size)]
    return Grid(
        size, cells[0], cells[1], frozenset(cells[2 : 2 + walls]), frozenset(cells[2 + walls : 2 + walls + holes])
    )


@dataclass(frozen=True, slots=True)
class Difficulty:
    """Which grids are drawn up: the shortest path takes `min_distance` to `max_distance` steps."""

    size: int = 4
    walls: int = 2
    holes: int = 2
    min_distance: int = 3
    max_distance: int = 10


@lru_cache(maxsize=8192)
def grid_item(difficulty: Difficulty, split: Split, index: int, seed: int = 0) -> Grid:
    """Task instance `index`; cached for the copies of a group. Raises UserInputError if there is no such grid."""
    rng = stable_rng("gridwalk", difficulty, split, index, seed)
    for _ in range(_MAX_DRAWS):
        grid = random_grid(rng, difficulty.size, difficulty.walls, difficulty.holes)
        if grid.split() != split:
            continue
        if difficulty.min_distance <= grid.distances().get(grid.agent, -1) <= difficulty.max_distance:
            return grid
    raise UserInputError(
        f"GridWalk-v0: no {split} grid of {difficulty.size}×{difficulty.size} cells with {difficulty.walls} walls, "
        f"{difficulty.holes} holes and {difficulty.min_distance} to {difficulty.max_distance} steps to the goal was "
        "found: lower min_distance, walls or holes, or raise size."
    )


@lru_cache(maxsize=512)
def _mask(height: int, width: int, inset: float, disc: bool) -> np.ndarray:
    """bool [height, width]: the pixels of a disc or a rectangle in a cell. Cached: there are few sizes of cells."""
    y, x = (np.mgrid[0:height, 0:width] + 0.5) / np.array([height, width])[:, None, None] - 0.5
    return np.hypot(x, y) <= 0.5 - inset if disc else np.maximum(np.abs(x), np.abs(y)) <= 0.5 - inset


def render(grid: Grid, image_size: int = IMAGE_SIZE) -> np.ndarray:
    """Paint a state: uint8 [image_size, image_size, 3]. RULES says what is what."""
    pixels = np.full((image_size, image_size, 3), BACKGROUND, dtype=np.uint8)
    edges = [round(number * image_size / grid.size) for number in range(grid.size + 1)]
    for edge in edges[1:-1]:
        pixels[edge] = pixels[:, edge] = LINE

    def paint(cell: Cell, colour: tuple[int, int, int], inset: float, disc: bool) -> None:
        (top, bottom), (left, right) = ((edges[k], edges[k + 1]) for k in cell)
        height, width = bottom - top, right - left
        pixels[top:bottom, left:right][_mask(height, width, inset, disc)] = colour

    for wall in grid.walls:
        paint(wall, WALL, 0.0, disc=False)
    for hole in grid.holes:
        paint(hole, HOLE, 0.06, disc=True)
    paint(grid.goal, GOAL, 0.16, disc=False)
    paint(grid.agent, AGENT, 0.12, disc=True)
    return pixels


MIN_TURNS, MAX_TURNS = 2, 10
MIN_IMAGE_SIZE, MAX_IMAGE_SIZE = 64, 1024


@lru_cache(maxsize=65_536)
def picture_of(grid: Grid, image_size: int = IMAGE_SIZE) -> EncodedImage:
    """The picture of a state. Equal states give equal bytes, so a picture's hash names its state."""
    return EncodedImage.from_pil(Image.fromarray(render(grid, image_size)))


def parse_move(text: str) -> str | None:
    """The move, if the last word is one of the four; None otherwise. What stands before it is the policy's thinking."""
    words = text.strip().removesuffix(".").lower().split()
    return words[-1] if words and words[-1] in MOVES else None


class GridWalkEnv(EpisodeEnv):
    """Walk to the goal of a drawn grid around walls and holes: one move (up, down, left or right) a turn.

    size: cells per side. walls, holes: how many; walls stop the agent, a hole ends the episode. min_distance: steps of
    the shortest path at least; every grid can be solved in `max_turns`. prompt: "brief" asks in three words, for the
    tiny model. image_size: pixels per side. seed: which set of grids.

    The reward is 1 at the goal and 0 otherwise. An answer that names no move is told what is expected and still costs a
    turn. `info` holds `success`, `outcome` ("goal", "hole", "turns" or "walking"), `steps` (turns used), `well_formed`,
    and `shortest_path` (steps from the start).
    """

    name = "GridWalk-v0"

    def __init__(
        self,
        size: Annotated[int, Field(ge=MIN_SIZE, le=MAX_SIZE)] = 4,
        *,
        walls: Annotated[int, Field(ge=0)] = 2,
        holes: Annotated[int, Field(ge=0)] = 2,
        max_turns: Annotated[int, Field(ge=MIN_TURNS, le=MAX_TURNS)] = 8,
        min_distance: Count = 3,
        prompt: Literal["full", "brief"] = "full",
        image_size: Annotated[int, Field(ge=MIN_IMAGE_SIZE, le=MAX_IMAGE_SIZE)] = IMAGE_SIZE,
        seed: int = 0,
        num_train: Count = 4096,
        num_test: Count = 512,
    ) -> None:
        super().__init__(num_train=num_train, num_test=num_test, max_turns=max_turns)
        if walls + holes > size * size - 2:
            raise UserInputError(
                f"GridWalk-v0: env.kwargs.walls ({walls}) and holes ({holes}) leave no room for agent and goal in "
                f"{size}×{size} cells: lower one, or raise size."
            )
        if min_distance > max_turns:
            raise UserInputError(
                "GridWalk-v0: env.kwargs.min_distance must be an integer from 1 to env.kwargs.max_turns "
                f"({max_turns}), not {min_distance!r}."
            )
        self.difficulty = Difficulty(size, walls, holes, min_distance, max_turns)
        self.prompt = prompt
        self.image_size = image_size
        self.seed = seed

    def open(self, item: Item) -> tuple[Observation, Info]:
        self._grid = grid_item(self.difficulty, item.split, item.index, self.seed)
        self._shortest = self._grid.distances()[self._grid.agent]
        rules = RULES.format(turns=self.max_turns) if self.prompt == "full" else ""
        return self._show(rules + QUESTION), {"shortest_path": self._shortest}

    def reply(self, text: str) -> Reply:
        move = parse_move(text)
        grid = self._grid = self._grid if move is None else self._grid.moved(move)
        success, fallen = grid.agent == grid.goal, grid.agent in grid.holes
        out_of_turns = not success and not fallen and self.is_last_turn
        info: Info = {
            "success": success,
            "outcome": "goal" if success else "hole" if fallen else "turns" if out_of_turns else "walking",
            "steps": self.turn,
            "well_formed": move is not None,
            "shortest_path": self._shortest,
        }
        if success or fallen:
            return Reply(float(success), None, info)
        return Reply(0.0, self._show(QUESTION if move else EXPECTED), info)

    def _show(self, text: str) -> Observation:
        return Observation.user(picture_of(self._grid, self.image_size), text)
