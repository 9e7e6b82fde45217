"""Lessons of the tiny model for mixtures of environments: those of three tiny models, mixed."""

from __future__ import annotations

from random import Random

import numpy as np

from rl_vlm.zoo.scenes import lesson as scenes
from rl_vlm.zoo.shapes.lesson import perception_dialogue, target_dialogue
from rl_vlm.zoo.tiny.dialogues import Draw, Turns
from rl_vlm.zoo.zoom import lesson as zoom

# Of the dialogues; the rest are glances. Counting in two pictures takes longest to learn.
SHAPES_SHARE, SCENES_SHARE = 0.22, 0.53
TARGET_SHARE = 0.38  # of the dialogues about shapes
CORPUS = (*scenes.CORPUS, *zoom.CORPUS)


def drawer(seed: int) -> Draw:
    """A function that draws conversations for one warm start."""
    rng, numbers = Random(f"allrounder {seed}"), np.random.default_rng([seed, 8])

    def draw() -> Turns:
        kind = rng.random()
        if kind < SHAPES_SHARE:
            dialogue = target_dialogue if numbers.random() < TARGET_SHARE else perception_dialogue
            return dialogue(numbers).turns
        if kind < SHAPES_SHARE + SCENES_SHARE:
            return [("user", *scenes.draw_lesson(rng))]
        return zoom.draw_glances(rng)

    return draw
