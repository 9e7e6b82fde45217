"""The tiny judge's warm start: it learns what scenes hold, to caption them vaguely, and to tell the better of two captions."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np

from rl_vlm.models.supervised import DialogueEncoder
from rl_vlm.zoo.caption.lesson import CHOICES, Comparison, draw_lesson, judge_lesson, random_comparison
from rl_vlm.zoo.tiny.replies import option_odds
from rl_vlm.zoo.tiny.warmstart import teach_drawn

STEPS = 1200
BATCH = 32

logger = logging.getLogger(__name__)


def warm_start(model: Any, encoder: DialogueEncoder, seed: int, steps: int = STEPS, batch: int = BATCH) -> float:
    """Train all weights in place on random lessons; returns the last loss (nats per token)."""
    rng = Random(f"judge {seed}")
    return teach_drawn(model, encoder, lambda: encoder.encode_turn(*draw_lesson(rng)), steps, batch, "tiny judge:")


def choice_odds(
    model: Any, encoder: DialogueEncoder, comparisons: Sequence[Comparison]
) -> tuple[np.ndarray, np.ndarray]:
    """(float32 [N, 2], bool [N]): how likely the first and the second caption are chosen once the right description is written, and
    whether the description that the model would write itself (greedily) is the right one.
    """
    lessons = [[judge_lesson(one, choice) for choice in CHOICES] for one in comparisons]
    return option_odds(
        model, encoder, [both[0][0] for both in lessons], [[reply for _, reply in both] for both in lessons]
    )


def judged_share(
    model: Any, encoder: DialogueEncoder, comparisons: Sequence[Comparison]
) -> tuple[float, float, float, float]:
    """Asked in both orders: the share of right descriptions, of choices that are right, of pairs that are judged rightly in both
    orders, and of pairs where the orders contradict each other.
    """
    swapped = [replace(one, captions=one.captions[::-1], scores=one.scores[::-1]) for one in comparisons]
    (given, seen), (other, _) = (choice_odds(model, encoder, asked) for asked in (comparisons, swapped))
    first, first_swapped = given.argmax(1), other.argmax(1)
    truth = np.array([CHOICES.index(one.better) for one in comparisons])
    right, right_swapped = first == truth, first_swapped == 1 - truth
    return (
        float(seen.mean()),
        float((right.mean() + right_swapped.mean()) / 2),
        float((right & right_swapped).mean()),
        float((first == first_swapped).mean()),
    )


def held_out(count: int) -> list[Comparison]:
    """Comparisons about scenes of the test split."""
    rng = Random("held out")
    return [random_comparison(rng, "test") for _ in range(count)]


def log_accuracy(model: Any, encoder: DialogueEncoder, loss: float, seconds: float) -> None:
    """Log how well the model judges captions of scenes that it was not taught."""
    logger.info(
        "tiny judge: done in %.0f s, loss %.3f; right descriptions %.2f, right choices %.2f (chance 0.50), right in both orders %.2f, contradictions %.2f",
        seconds, loss, *judged_share(model, encoder, held_out(256)),
    )  # fmt: skip
