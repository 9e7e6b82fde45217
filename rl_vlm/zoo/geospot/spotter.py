"""The tiny spotter's warm start: it learns where on a picture the pin is and to answer in five lines, not which place is where."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from rl_vlm.models.supervised import DialogueEncoder, Example, collate, missed
from rl_vlm.zoo.geospot import world
from rl_vlm.zoo.geospot.lesson import cell, draw_spot
from rl_vlm.zoo.shapes.data import split_of
from rl_vlm.zoo.tiny.warmstart import teach_drawn

STEPS = 400
BATCH = 48
_QUESTION = "Cell of pin?"

logger = logging.getLogger(__name__)


def warm_start(model: Any, encoder: DialogueEncoder, seed: int, steps: int = STEPS, batch: int = BATCH) -> float:
    """Train all weights in place on random maps; returns the last loss (nats per token)."""
    rng = np.random.default_rng([seed, 4])

    def draw() -> Example:
        pixels, question, reply = draw_spot(rng)
        return encoder.encode_turn((pixels, question), reply)

    return teach_drawn(model, encoder, draw, steps, batch, "tiny spotter:")


def cell_accuracy(model: Any, encoder: DialogueEncoder, num_questions: int = 200) -> float:
    """The share of pins on maps of the test split whose column and row are both the likeliest."""
    rng = np.random.default_rng(12345)
    examples: list[Example] = []
    while len(examples) < num_questions:
        position = float(rng.uniform(-60, 85)), float(rng.uniform(-180, 180))
        pixels = world.render(world.Window(), position)
        if split_of(pixels) == "test":
            column, row = cell(position)
            examples.append(encoder.encode_turn((pixels, _QUESTION), f"{column} {row}"))
    return float((~missed(model, *collate(examples, encoder.pad_token_id)).any(1)).float().mean())


def log_accuracy(model: Any, encoder: DialogueEncoder, loss: float, seconds: float) -> None:
    """Log how often the model is right about where the pin is."""
    logger.info(
        "tiny spotter: done in %.0f s, loss %.3f; right about the pin's cell %.2f (chance %.2f)",
        seconds, loss, cell_accuracy(model, encoder), 1 / 64,
    )  # fmt: skip
