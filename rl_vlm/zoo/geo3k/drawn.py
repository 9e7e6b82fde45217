"""Drawn geometry questions in levels of difficulty: what `Geo3k-v0` asks without a data set.

The hash of a picture's pixels is its split, and a picture of the other split is drawn again: no picture of a test item is ever
trained on. (The numbers are few at an easy level, and both splits have them.)
"""

from __future__ import annotations

from functools import lru_cache
from random import Random

import numpy as np

from rl_vlm.envs.data import Question
from rl_vlm.envs.one_shot import MAX_IMAGE_SIZE, check_integers
from rl_vlm.types import EncodedImage, Split, UserInputError
from rl_vlm.zoo.drawing import split_of, stable_random
from rl_vlm.zoo.geo3k.figures import draw_figure
from rl_vlm.zoo.geo3k.problems import ANGLE_STEPS, LEAST_SIZE, LEVELS, Problem

NAME = "Geo3k-v0"
IMAGE_SIZE = 256

Levels = int | list[int] | tuple[int, ...]


class DrawnQuestions:
    """Problems with figures that depend on (split, index, seed) and these arguments alone.

    level: from 1 (the third angle of a triangle) to 5 (areas), see `problems.py`; of several, each comes equally often.
    angle_step: angles are multiples of so many degrees: with 20 there are few answers, for a first try or a tiny model.
    image_size: pixels per side; None for 256.
    seed, num_train, num_test: which set of problems, and how many.
    """

    def __init__(
        self, level: Levels, angle_step: int, image_size: int | None, seed: int, num_train: int, num_test: int
    ) -> None:
        levels = tuple(level) if isinstance(level, list | tuple) else (level,)
        if not levels:
            raise UserInputError(f"{NAME}: env.kwargs.level must name a level from 1 to {max(LEVELS)}, or several.")
        check_integers(
            NAME,
            **{"level" if len(levels) == 1 else f"level[{k}]": (one, 1, max(LEVELS)) for k, one in enumerate(levels)},
            seed=(seed, None, None),
            num_train=(num_train, 1, None),
            num_test=(num_test, 1, None),
        )
        if isinstance(angle_step, bool) or angle_step not in ANGLE_STEPS:
            raise UserInputError(
                f"{NAME}: env.kwargs.angle_step must be one of {', '.join(map(str, ANGLE_STEPS))}, not {angle_step!r}."
            )
        size = IMAGE_SIZE if image_size is None else image_size
        least = max(LEAST_SIZE[one] for one in levels)
        check_integers(NAME, **{f"image_size at level {max(levels)}": (size, least, MAX_IMAGE_SIZE)})
        self._levels, self._angle_step, self._size, self._seed = levels, angle_step, size, seed
        self._num_items: dict[str, int] = {"train": num_train, "test": num_test}

    def num_questions(self, split: Split) -> int:
        """How many problems the split holds."""
        if split not in self._num_items:
            raise UserInputError(f'There is no split {split!r}; use "train" or "test".')
        return self._num_items[split]

    def validate(self, split: Split, limit: int | None = None) -> int:
        """Nothing has to be checked."""
        return 0

    def question(self, split: Split, index: int) -> Question:
        """Problem `index` of a split."""
        if not 0 <= index < self.num_questions(split):
            raise UserInputError(f"Item {index} does not exist: the {split} split has {self.num_questions(split)}.")
        problem, picture = drawn_problem(self._levels, self._angle_step, self._size, split, index, self._seed)
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
