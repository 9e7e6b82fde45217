"""The tiny observer's warm start: it learns what scenes hold and to answer in form, neither what follows nor what to say."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np

from rl_vlm.models.supervised import DialogueEncoder
from rl_vlm.zoo.scenes.data import StatedPair, pair_item
from rl_vlm.zoo.scenes.lesson import draw_lesson, verdict_lesson
from rl_vlm.zoo.tiny.replies import option_odds
from rl_vlm.zoo.tiny.warmstart import teach_drawn

STEPS = 700
BATCH = 48

logger = logging.getLogger(__name__)


def warm_start(model: Any, encoder: DialogueEncoder, seed: int, steps: int = STEPS, batch: int = BATCH) -> float:
    """Train all weights in place on random lessons; returns the last loss (nats per token)."""
    rng = Random(f"observer {seed}")
    return teach_drawn(model, encoder, lambda: encoder.encode_turn(*draw_lesson(rng)), steps, batch, "tiny observer:")


def verdict_odds(model: Any, encoder: DialogueEncoder, pairs: Sequence[StatedPair]) -> tuple[np.ndarray, np.ndarray]:
    """(float32 [N, 2], bool [N]): how likely False and True are once the right counts are written down, and whether the counts
    that the model would write itself (greedily) are the right ones.
    """
    lessons = [[verdict_lesson(pair, verdict) for verdict in (False, True)] for pair in pairs]
    return option_odds(
        model, encoder, [both[0][0] for both in lessons], [[reply for _, reply in both] for both in lessons]
    )


def log_accuracy(model: Any, encoder: DialogueEncoder, loss: float, seconds: float) -> None:
    """Log how often the model writes the right counts, and how likely the right verdict is after them, which should be chance."""
    pairs = [pair_item("test", index) for index in range(256)]
    odds, right = verdict_odds(model, encoder, pairs)
    chosen = odds[np.arange(len(pairs)), [int(pair.truth) for pair in pairs]].mean()
    logger.info(
        "tiny observer: done in %.0f s, loss %.3f; right counts %.2f, the right verdict %.2f (chance 0.50)",
        seconds, loss, right.mean(), chosen,
    )  # fmt: skip
