"""Drawings for Shapes-v0 and the questions that are asked about them.

A drawing holds one to four shapes on mid-grey, at most one in each quadrant. The environment and the warm start of the tiny model
share this module and so the pictures and the questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl_vlm.types import Split, UserInputError
from rl_vlm.zoo.drawing import COLOURS, CORNERS, IMAGE_SIZE, KINDS, MAX_SHAPES, Shape, render, split_of, stable_rng

COUNT_QUESTION = "How many shapes?"
RULE_QUESTION = "Which number?"
TOOL_HINT = " Call calc_score."
TRY_AGAIN = "Wrong. Try again."
NUMBERS = ("1", "2", "3", "4")


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a drawing, the right answer and the answers that would be well formed."""

    kind: str
    text: str
    answer: str
    choices: tuple[str, ...]


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
