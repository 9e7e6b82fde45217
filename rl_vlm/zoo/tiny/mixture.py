"""Lessons of the tiny model for mixtures of environments: those of shapes, scenes and zoom."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np

from rl_vlm.zoo.scenes import lesson as scenes
from rl_vlm.zoo.shapes.lesson import perception_dialogue, target_dialogue
from rl_vlm.zoo.tiny.teach import Draw, Exchange
from rl_vlm.zoo.zoom import lesson as zoom

# Of the conversations; the rest are glances. Counting in two pictures takes longest to learn.
SHAPES_SHARE, SCENES_SHARE = 0.22, 0.53
TARGET_SHARE = 0.38  # of the conversations about shapes
CORPUS = (*scenes.CORPUS, *zoom.CORPUS)


def drawer(seed: int) -> Draw:
    rng, numbers = Random(f"allrounder {seed}"), np.random.default_rng([seed, 8])

    def draw() -> Sequence[Exchange]:
        kind = rng.random()
        if kind < SHAPES_SHARE:
            return target_dialogue(numbers) if numbers.random() < TARGET_SHARE else perception_dialogue(numbers)
        if kind < SHAPES_SHARE + SCENES_SHARE:
            return [scenes.draw_lesson(rng)]
        return zoom.draw_glances(rng)

    return draw
