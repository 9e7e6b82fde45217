"""Shared by the drawn environments: plain shapes on mid-grey, random numbers by key, and the split of a drawing.

A hash of the drawing, or of the values that decide its pixels, decides its split, and a drawing of the wrong split is
drawn again. So train and test drawings are disjoint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random

import numpy as np

from rl_vlm.types import Split

BACKGROUND = 128  # mid-grey: 0 after normalisation with mean 0.5, so only shapes carry signal
IMAGE_SIZE = 64
MIN_IMAGE_SIZE, MAX_IMAGE_SIZE = 64, 1024  # smaller drawings could join neighbours
MAX_SHAPES = 4

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (230, 30, 30),
    "green": (30, 200, 40),
    "blue": (40, 60, 235),
    "yellow": (240, 220, 30),
}
KINDS = ("circle", "square", "triangle")
CORNERS = ("top left", "top right", "bottom left", "bottom right")  # quadrant number = 2 * row + column
TEST_BUCKET = 64  # a hash whose first byte is below this belongs to the test split: a quarter of all


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape: quadrant 0-3 (see CORNERS), kind, colour, and its box in pixels of a 64-pixel drawing."""

    quadrant: int
    kind: str
    colour: str
    x: int
    y: int
    size: int


def stable_rng(*key: object) -> np.random.Generator:
    """A generator that depends on the key alone: equal in every process and on every machine."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))


def stable_random(*key: object) -> Random:
    """As `stable_rng`, with Python's own generator, which is faster for few numbers, one by one."""
    return Random(int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=16).digest(), "little"))


@lru_cache(maxsize=512)
def _mask(kind: str, size: int) -> np.ndarray:
    """bool [size, size]: the pixels of a shape; every shape touches all four sides of its box."""
    y, x = np.mgrid[0:size, 0:size]
    if kind == "square":
        return np.ones((size, size), dtype=bool)
    if kind == "circle":
        centre = (size - 1) / 2
        return (x - centre) ** 2 + (y - centre) ** 2 <= (size / 2) ** 2
    return np.abs(x - (size - 1) / 2) <= (y + 1) / 2


def render(shapes: Sequence[Shape], image_size: int = IMAGE_SIZE) -> np.ndarray:
    """Draw shapes: uint8 [image_size, image_size, 3]."""
    pixels = np.full((image_size, image_size, 3), BACKGROUND, dtype=np.uint8)
    scale = image_size / IMAGE_SIZE
    for shape in shapes:
        x, y, size = (round(value * scale) for value in (shape.x, shape.y, shape.size))
        pixels[y : y + size, x : x + size][_mask(shape.kind, size)] = COLOURS[shape.colour]
    return pixels


def split_of_hash(first_byte: int) -> Split:
    return "test" if first_byte < TEST_BUCKET else "train"


def split_of(pixels: np.ndarray) -> Split:
    """The split of a drawing, by its pixels."""
    return split_of_hash(hashlib.blake2b(np.ascontiguousarray(pixels).data, digest_size=16).digest()[0])


def split_of_content(content: Sequence[object]) -> Split:
    """The split of a drawing, by the plain values that decide its pixels."""
    return split_of_hash(hashlib.blake2b(repr(content).encode(), digest_size=1).digest()[0])
