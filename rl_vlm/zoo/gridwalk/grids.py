"""The grids of GridWalk-v0: their states, how they are drawn at random, and their pictures."""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from PIL import Image

from rl_vlm.types import EncodedImage, Split, UserInputError
from rl_vlm.zoo.drawing import BACKGROUND, split_of_hash, stable_rng

Cell = tuple[int, int]  # row and column, from the top left

IMAGE_SIZE = 64
MOVES: dict[str, Cell] = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}

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


@lru_cache(maxsize=65_536)
def picture_of(grid: Grid, image_size: int = IMAGE_SIZE) -> EncodedImage:
    """The picture of a state. Equal states give equal bytes, so a picture's hash names its state."""
    return EncodedImage.from_pil(Image.fromarray(render(grid, image_size)))
