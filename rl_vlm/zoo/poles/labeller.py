"""The tiny labeller's warm start: supervised lessons in which it learns to compare pictures of poles, in a minute."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from rl_vlm.models.supervised import DialogueEncoder, Example, collate, token_logprobs
from rl_vlm.models.vision import fast_vision
from rl_vlm.zoo.poles.lesson import comparison, draw_lesson, random_angle, right_label
from rl_vlm.zoo.tiny.warmstart import teach

STEPS = 600
BATCH = 64
LEARNING_RATE = 3e-3
_RISE = 20  # steps until the full learning rate
_LOG_EVERY_S = 10.0
ROUNDS = 3
_GOOD = 0.9  # share of clear pairs that it must be right on
_CHOICES = (0, 1, -1)

logger = logging.getLogger(__name__)


def warm_start(
    model: Any, encoder: DialogueEncoder, seed: int, steps: int = STEPS, batch: int = BATCH, rounds: int | None = None
) -> float:
    """Train all weights in place on random lessons; returns the last loss (nats per token).

    With a few seeds the model has not learned to compare at the end of the learning rate schedule; these get further
    rounds of lessons, at most `rounds` (ROUNDS by default) in all.
    """
    rng = np.random.default_rng([seed, 2])
    with fast_vision(model):
        loss = _lessons(model, encoder, rng, steps, batch)
        for _ in range(1, rounds or ROUNDS):
            if right_share(model, encoder)[0] >= _GOOD:
                break
            logger.info("tiny labeller: cannot compare yet (loss %.3f), another round", loss)
            loss = _lessons(model, encoder, rng, steps, batch)
    return loss


def _lessons(model: Any, encoder: DialogueEncoder, rng: np.random.Generator, steps: int, batch: int) -> float:
    def examples() -> list[Example]:
        return [encoder.encode_turn(lesson.parts, lesson.reply) for lesson in (draw_lesson(rng) for _ in range(batch))]

    # Drawn one by one: the next round goes on with the same random numbers.
    batches = (examples() for _ in range(steps))
    return teach(
        model, encoder, batches, steps, LEARNING_RATE, name="tiny labeller:", rise=_RISE, log_every_s=_LOG_EVERY_S
    )


def labels_of(model: Any, encoder: DialogueEncoder, pairs: list[tuple[float, float]]) -> np.ndarray:
    """int64 [N]: the likeliest label for each pair of angles, in the order given."""
    found: list[np.ndarray] = []
    for start in range(0, len(pairs), 64):
        part = pairs[start : start + 64]
        examples = [encoder.encode_turn(comparison(*pair).parts, str(choice)) for pair in part for choice in _CHOICES]
        arguments, targets = collate(examples, encoder.pad_token_id)
        with torch.no_grad():
            logprobs = token_logprobs(model, arguments, targets).sum(1).reshape(-1, len(_CHOICES))
        found.append(np.array(_CHOICES)[logprobs.argmax(1).numpy()])
    return np.concatenate(found)


def right_share(model: Any, encoder: DialogueEncoder) -> tuple[float, float]:
    """On new pairs, asked in both orders: the share of right answers for pairs that differ clearly, and the share of
    contradictions among all pairs.
    """
    rng = np.random.default_rng(12345)
    pairs = [(random_angle(rng), random_angle(rng)) for _ in range(200)]
    given = labels_of(model, encoder, pairs)
    swapped = labels_of(model, encoder, [(second, first) for first, second in pairs])
    swapped = np.where(swapped == -1, -1, 1 - swapped)
    final = np.where(given == swapped, given, -1)
    truth = np.array([right_label(first, second, tie=3.0) for first, second in pairs])
    clear = truth != -1
    return float((final == truth)[clear].mean()), float((given != swapped).mean())


def log_accuracy(model: Any, encoder: DialogueEncoder, loss: float, seconds: float) -> None:
    """Log the accuracy."""
    logger.info(
        "tiny labeller: done in %.0f s, loss %.3f; right on %.2f of clear pairs (both orders), contradicts itself on %.2f",
        seconds, loss, *right_share(model, encoder),
    )  # fmt: skip
