"""The tiny geometer's warm start: it learns to read the numbers of a figure and to answer in form, not what follows from them."""

from __future__ import annotations

import logging
from random import Random
from typing import Any

import numpy as np

from rl_vlm.models.supervised import DialogueEncoder
from rl_vlm.zoo.geo3k.drawn import drawn_problem
from rl_vlm.zoo.geo3k.lesson import (
    ANGLE_STEP,
    GUESSES,
    IMAGE_SIZE,
    LEVEL,
    FigureDialogues,
    boxed,
    pixels_of,
    written,
)  # fmt: skip
from rl_vlm.zoo.tiny.replies import option_odds
from rl_vlm.zoo.tiny.warmstart import encode_dialogue, teach_drawn

STEPS = 400
BATCH = 48
QUESTION = "Find x.\nAnswer: \\boxed{x}"  # as the environment asks without the tool

logger = logging.getLogger(__name__)


def warm_start(model: Any, encoder: DialogueEncoder, seed: int, steps: int = STEPS, batch: int = BATCH) -> float:
    """Train all weights in place on random dialogues; returns the last loss (nats per token)."""
    rng = Random(f"geometer {seed}")
    dialogues = FigureDialogues(seed)
    return teach_drawn(
        model, encoder, lambda: encode_dialogue(encoder, dialogues.draw(rng)), steps, batch, "tiny geometer:"
    )


def guess_odds(model: Any, encoder: DialogueEncoder, num_items: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(float32 [N, G], bool [N, G], bool [N]) on test items: how likely each of GUESSES is once the numbers are rightly written
    down, which of them is right, and whether the numbers that the model would write itself (greedily) are the right ones.
    """
    drawn = [drawn_problem((LEVEL,), ANGLE_STEP, IMAGE_SIZE, "test", index) for index in range(num_items)]
    guesses = [str(guess) for guess in GUESSES]
    replies = [[written(problem.numbers, guess) + boxed(guess) for guess in guesses] for problem, _ in drawn]
    odds, read = option_odds(model, encoder, [(pixels_of(picture), QUESTION) for _, picture in drawn], replies)
    return odds, np.array([[guess == problem.answer for guess in guesses] for problem, _ in drawn]), read


def log_accuracy(model: Any, encoder: DialogueEncoder, loss: float, seconds: float) -> None:
    """Log how often the model reads the numbers rightly, and how likely the right guess is after them, which should be chance."""
    odds, correct, read = guess_odds(model, encoder, 256)
    logger.info(
        "tiny geometer: done in %.0f s, loss %.3f; right numbers %.2f, the right guess %.2f (chance %.2f)",
        seconds, loss, read.mean(), odds[correct].mean(), 1 / len(GUESSES),
    )  # fmt: skip
