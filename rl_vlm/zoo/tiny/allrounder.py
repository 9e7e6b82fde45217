"""The tiny all-rounder's warm start: the lessons of three tiny models mixed, for runs that train in several environments at once."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np

from rl_vlm.models.supervised import DialogueEncoder, Example
from rl_vlm.zoo.scenes import observer
from rl_vlm.zoo.scenes.lesson import draw_lesson
from rl_vlm.zoo.shapes.lesson import perception_dialogue, target_dialogue
from rl_vlm.zoo.tiny import warmstart
from rl_vlm.zoo.zoom import inspector
from rl_vlm.zoo.zoom.lesson import draw_glances

STEPS = 1100
BATCH = 48
# Of the dialogues; the rest are glances. Counting in two pictures takes longest to learn.
SHAPES_SHARE, SCENES_SHARE = 0.22, 0.53
TARGET_SHARE = 0.38  # of the dialogues about shapes


def warm_start(model: Any, encoder: DialogueEncoder, seed: int, steps: int = STEPS, batch: int = BATCH) -> float:
    """Train all weights in place on random lessons; returns the last loss (nats per token)."""
    rng, numbers = Random(f"allrounder {seed}"), np.random.default_rng([seed, 8])

    def draw() -> Example:
        kind = rng.random()
        if kind < SHAPES_SHARE:
            dialogue = target_dialogue if numbers.random() < TARGET_SHARE else perception_dialogue
            return warmstart.encode_dialogue(encoder, dialogue(numbers))
        if kind < SHAPES_SHARE + SCENES_SHARE:
            return encoder.encode_turn(*draw_lesson(rng))
        return encoder.encode_chat(draw_glances(rng))

    return warmstart.teach_drawn(model, encoder, draw, steps, batch, "tiny all-rounder:")


def log_accuracy(model: Any, encoder: DialogueEncoder, loss: float, seconds: float) -> None:
    """Log for each of the three what its own model's warm start logs."""
    for lessons in (warmstart, observer, inspector):
        lessons.log_accuracy(model, encoder, loss, seconds)
