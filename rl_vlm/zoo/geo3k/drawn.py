"""Drawn geometry questions in levels of difficulty: what `Geo3k-v0` asks without a data set.

The hash of a picture's pixels is its split, and a picture of the other split is drawn again: no picture of a test item is ever
trained on. (The numbers are few at an easy level, and both splits have them.)
"""

from __future__ import annotations

from functools import lru_cache
from random import Random
from typing import Annotated

import numpy as np
from pydantic import Field

from rl_vlm.envs.data import Question
from rl_vlm.types import EncodedImage, Split, UserInputError
from rl_vlm.zoo.drawing import MAX_IMAGE_SIZE, split_of, stable_random
from rl_vlm.zoo.geo3k.figures import draw_figure
from rl_vlm.zoo.geo3k.problems import ANGLE_STEPS, LEAST_SIZE, LEVELS, Problem

NAME = "Geo3k-v0"
IMAGE_SIZE = 256

Level = Annotated[int, Field(ge=1, le=max(LEVELS))]


class Drawing:
    """Problems with figures that depend on (split, index) and these arguments alone.

    levels: from 1 (the third angle of a triangle) to 5 (areas), see `problems.py`; of several, each comes equally often.
    angle_step: angles are multiples of so many degrees: with 20 there are few answers, for a first try or a tiny model.
    image_size: pixels per side; None for 256.
    """

    def __init__(self, levels: tuple[int, ...], angle_step: int, image_size: int | None, seed: int) -> None:
        if angle_step not in ANGLE_STEPS:
            raise UserInputError(
                f"{NAME}: env.kwargs.angle_step must be one of {', '.join(map(str, ANGLE_STEPS))}, not {angle_step!r}."
            )
        size = IMAGE_SIZE if image_size is None else image_size
        least = max(LEAST_SIZE[level] for level in levels)
        if not least <= size <= MAX_IMAGE_SIZE:
            raise UserInputError(
                f"{NAME}: env.kwargs.image_size at level {max(levels)} must be from {least} to {MAX_IMAGE_SIZE}, not {size}."
            )
        self._arguments = levels, angle_step, size
        self._seed = seed

    def question(self, split: Split, index: int) -> Question:
        """Problem `index` of a split."""
        problem, picture = drawn_problem(*self._arguments, split, index, self._seed)
        return Question(problem.text, problem.answer, (picture,), f"drawn {split} item {index}", problem.kind)


@lru_cache(maxsize=4096)
def drawn_problem(
    levels: tuple[int, ...], angle_step: int, image_size: int, split: Split, index: int, seed: int = 0
) -> tuple[Problem, EncodedImage]:
    """Problem `index` of a split and its picture; the levels take turns. Cached, for the copies of a group."""
    rng = stable_random("geo3k", levels, angle_step, image_size, split, index, seed)
    return random_problem(rng, levels[index % len(levels)], angle_step, image_size, split)


def random_problem(
    rng: Random, level: int, angle_step: int, image_size: int, split: Split
) -> tuple[Problem, EncodedImage]:
    """A problem of a level and its picture, which belongs to the split."""
    while True:
        problem = rng.choice(LEVELS[level])(rng, angle_step)
        picture = draw_figure(problem.figure, rng, image_size)
        if split_of(np.asarray(picture)) == split:
            return problem, EncodedImage.from_pil(picture)
