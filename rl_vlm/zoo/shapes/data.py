"""Drawings of simple shapes and the questions that are asked about them.

A drawing holds one to four shapes on mid-grey, at most one in each quadrant. The environment `Shapes-v0` and the warm
start of the tiny model share this module and so the pictures and the questions.

Train and test drawings are disjoint by construction: the hash of a drawing's pixels decides its split, and a drawing
that falls into the other split is drawn again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from rl_vlm.types import Split, UserInputError

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

COUNT_QUESTION = "How many shapes?"
RULE_QUESTION = "Which number?"
TOOL_HINT = " Call calc_score."
TRY_AGAIN = "Wrong. Try again."
NUMBERS = ("1", "2", "3", "4")

# The share of drawings that belong to the test split: first byte of the pixel hash below this, out of 256.
_TEST_BUCKET = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape: quadrant 0-3 (see CORNERS), kind, colour, and its box in pixels of a 64-pixel drawing."""

    quadrant: int
    kind: str
    colour: str
    x: int
    y: int
    size: int


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a drawing, the right answer and the answers that would be well formed."""

    kind: str
    text: str
    answer: str
    choices: tuple[str, ...]


def stable_rng(*key: object) -> np.random.Generator:
    """A generator that depends on the key alone: equal in every process and on every machine."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))


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


def pixel_hash(pixels: np.ndarray) -> str:
    """The hash of a drawing's pixels, which decides its split."""
    return hashlib.blake2b(np.ascontiguousarray(pixels).data, digest_size=16).hexdigest()


def split_of(pixels: np.ndarray) -> Split:
    """Which split a drawing belongs to."""
    return "test" if int(pixel_hash(pixels)[:2], 16) < _TEST_BUCKET else "train"


def draw_shapes(rng: np.random.Generator, count: int) -> tuple[Shape, ...]:
    """`count` random shapes in different quadrants, in the order of the quadrants."""
    half = IMAGE_SIZE // 2
    quadrants = np.sort(rng.permutation(MAX_SHAPES)[:count])
    kinds = rng.integers(0, len(KINDS), size=count)
    colours = rng.integers(0, len(COLOURS), size=count)
    sizes = rng.integers(12, 23, size=count)
    offsets = rng.random((count, 2))
    names = tuple(COLOURS)
    shapes = []
    for quadrant, kind, colour, size, (dx, dy) in zip(quadrants, kinds, colours, sizes, offsets, strict=True):
        room = half - int(size) - 2  # one pixel of grey on either side keeps neighbours apart
        x = int(quadrant % 2) * half + 1 + int(dx * (room + 1))
        y = int(quadrant // 2) * half + 1 + int(dy * (room + 1))
        shapes.append(Shape(int(quadrant), KINDS[kind], names[colour], x, y, int(size)))
    return tuple(shapes)


def draw(
    rng: np.random.Generator, count: int, split: Split, image_size: int = IMAGE_SIZE
) -> tuple[tuple[Shape, ...], np.ndarray]:
    """A random drawing of `count` shapes that belongs to `split`: the shapes and the pixels."""
    while True:
        shapes = draw_shapes(rng, count)
        pixels = render(shapes, image_size)
        if split_of(pixels) == split:
            return shapes, pixels


def rule_numbers(seed: int) -> dict[str, str]:
    """The hidden rule of a dataset: colour -> number, a random one-to-one map."""
    order = stable_rng("rule", seed).permutation(len(COLOURS))
    return {colour: str(int(number) + 1) for colour, number in zip(COLOURS, order, strict=True)}


def count_question(shapes: Sequence[Shape]) -> Question:
    """How many shapes are there?"""
    return Question("count", COUNT_QUESTION, str(len(shapes)), NUMBERS)


def rule_question(shapes: Sequence[Shape], seed: int) -> Question:
    """Which number does the hidden rule give to the colour of the only shape?"""
    if len(shapes) != 1:
        raise UserInputError(f"The rule question needs a drawing of one shape, not {len(shapes)}.")
    return Question("rule", RULE_QUESTION, rule_numbers(seed)[shapes[0].colour], NUMBERS)


def colour_question(shapes: Sequence[Shape]) -> Question:
    """Which colour has the only shape?"""
    return Question("colour", "What colour?", shapes[0].colour, tuple(COLOURS))


def corner_question(shapes: Sequence[Shape]) -> Question:
    """In which corner is the only shape?"""
    return Question("corner", "Which corner?", CORNERS[shapes[0].quadrant], CORNERS)


def presence_question(shapes: Sequence[Shape], quadrant: int) -> Question:
    """Is there a shape in this corner?"""
    answer = "yes" if any(shape.quadrant == quadrant for shape in shapes) else "no"
    return Question("presence", f"Is a shape at {CORNERS[quadrant]}?", answer, ("yes", "no"))


def perception_question(
    rng: np.random.Generator, split: Split = "train", image_size: int = IMAGE_SIZE
) -> tuple[Question, np.ndarray]:
    """A random question about colour, corner or presence, with its drawing."""
    kind = int(rng.integers(0, 3))
    if kind < 2:
        shapes, pixels = draw(rng, 1, split, image_size)
        return (colour_question(shapes) if kind == 0 else corner_question(shapes)), pixels
    # 2 shapes of 4 places on average, so that "yes" and "no" are equally frequent
    count = int(rng.choice((1, 2, 2, 3)))
    shapes, pixels = draw(rng, count, split, image_size)
    return presence_question(shapes, int(rng.integers(0, MAX_SHAPES))), pixels


def format_answer(answer: str) -> str:
    """The one form in which an answer counts."""
    return f"<answer>{answer}</answer>"


def format_call(answer: str) -> str:
    """The answer as a call of the scoring tool, as short as JSON allows."""
    return f'<tool_call>{{"name":"calc_score","arguments":{{"answer":"{answer}"}}}}</tool_call>'
