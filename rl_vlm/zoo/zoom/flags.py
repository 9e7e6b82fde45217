"""The drawn pictures of Zoom-v0: a flag whose pattern may be too fine for the overview, among plain shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np

from rl_vlm.types import Split
from rl_vlm.zoo.drawing import IMAGE_SIZE, KINDS, MAX_SHAPES, Shape, render, split_of_content, stable_random

# A drawing is `zoom` times as wide and high as its overview. The cloth of a hard flag has fields of half a pixel of
# the overview: each pixel there is the mean of two red and two white fields, so the overviews of all patterns are
# equal in every byte. The hash of a layout, without the pattern, is its split: no test overview is trained on.

RED, WHITE = (230, 30, 30), (250, 250, 250)  # their mean is exact in 8 bits
PLAIN_COLOURS = ("green", "blue", "yellow")  # of the shapes around the flag
# Whether the field in row i and column j is red. In every two by two fields two are, whatever the pattern.
_RED_FIELDS: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "rows": lambda i, j: (i + 0 * j) % 2 == 0,
    "columns": lambda i, j: (0 * i + j) % 2 == 0,
    "checks": lambda i, j: (i + j) % 2 == 0,
    "bricks": lambda i, j: (i + j // 2) % 2 == 0,
    "stairs": lambda i, j: np.where((i // 2 + j // 2) % 2 == 0, i, j) % 2 == 0,
}
PATTERNS = tuple(_RED_FIELDS)
_CLOTH = np.array((WHITE, RED), dtype=np.uint8)
EASY, HARD = "easy", "hard"
# Sides of flags, in pixels of an overview of 64 pixels; hard ones keep this size in larger overviews.
_EASY_SIZES, _HARD_SIZES = (16, 26), (6, 9)
_PLAIN_SIZES = (6, 22)


@dataclass(frozen=True, slots=True)
class Flag:
    """A square flag: quadrant 0-3, its corner and side in pixels of the overview, the pattern of its cloth."""

    quadrant: int
    x: int
    y: int
    size: int
    hard: bool
    pattern: str


@dataclass(frozen=True, slots=True)
class FlagScene:
    """A flag and, in other quadrants, plain shapes; view_size: pixels per side of the overview."""

    flag: Flag
    shapes: tuple[Shape, ...]
    view_size: int = IMAGE_SIZE

    def split(self) -> Split:
        flag = self.flag
        content: list[object] = [self.view_size, flag.x, flag.y, flag.size, flag.hard]
        content += [(shape.kind, shape.colour, shape.x, shape.y, shape.size) for shape in self.shapes]
        return split_of_content(content)


def random_scene(rng: Random, pattern: str, hard: bool, split: Split, view_size: int = IMAGE_SIZE) -> FlagScene:
    """A flag with this pattern and one to three shapes, each in a quadrant of its own."""
    half, unit = view_size // 2, view_size // IMAGE_SIZE
    while True:
        quadrant, *others = rng.sample(range(MAX_SHAPES), rng.randint(2, MAX_SHAPES))
        size = rng.randint(*_HARD_SIZES) if hard else rng.randint(*_EASY_SIZES) * unit
        x, y = (rng.randint(1, half - size - 1) for _ in range(2))
        flag = Flag(quadrant, x + quadrant % 2 * half, y + quadrant // 2 * half, size, hard, pattern)
        scene = FlagScene(flag, tuple(_plain(rng, other) for other in sorted(others)), view_size)
        if scene.split() == split:
            return scene


def flag_item(split: Split, index: int, seed: int = 0, view_size: int = IMAGE_SIZE) -> FlagScene:
    """Task instance `index`: every other one is hard, and of ten neighbours two have each pattern."""
    rng = stable_random("zoom", split, index, seed)
    return random_scene(rng, PATTERNS[index // 2 % len(PATTERNS)], bool(index % 2), split, view_size)


def render_scene(scene: FlagScene, zoom: int) -> np.ndarray:
    """Paint the whole picture: uint8 [view_size · zoom, view_size · zoom, 3]. `zoom` is even."""
    pixels = render(scene.shapes, scene.view_size * zoom)
    flag = scene.flag
    field = zoom // 2 if flag.hard else 2 * zoom * scene.view_size // IMAGE_SIZE
    # The cloth is cut from a roll that covers the picture, so that fields begin at the same places for every flag.
    rows, columns = (np.arange(start * zoom, (start + flag.size) * zoom) // field for start in (flag.y, flag.x))
    red = _RED_FIELDS[flag.pattern](rows[:, None], columns[None, :])
    area = pixels[flag.y * zoom : (flag.y + flag.size) * zoom, flag.x * zoom : (flag.x + flag.size) * zoom]
    area[:] = _CLOTH[red.view(np.uint8)]
    return pixels


def _plain(rng: Random, quadrant: int) -> Shape:
    half, size = IMAGE_SIZE // 2, rng.randint(*_PLAIN_SIZES)
    x, y = (rng.randint(1, half - size - 1) for _ in range(2))
    x, y = x + quadrant % 2 * half, y + quadrant // 2 * half
    return Shape(quadrant, rng.choice(KINDS), rng.choice(PLAIN_COLOURS), x, y, size)
