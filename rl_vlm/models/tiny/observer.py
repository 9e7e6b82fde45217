"""The tiny observer's warm start: it learns what scenes hold and to answer in form, neither what follows nor what to say."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import torch

from rl_vlm.envs.scenes import StatedPair, pair_item
from rl_vlm.models.supervised import DialogueEncoder, Example, collate, token_logprobs
from rl_vlm.models.tiny.sights import draw_lesson, verdict_lesson
from rl_vlm.models.tiny.warmstart import drawn_ahead, teach
from rl_vlm.models.vision import fast_vision

STEPS = 600
BATCH = 48
LEARNING_RATE = 3e-3
_RISE = 20  # steps until the full learning rate
_LOG_EVERY_S = 10.0
_ROWS = 64  # per forward pass

logger = logging.getLogger(__name__)


def warm_start(model: Any, encoder: DialogueEncoder, seed: int, steps: int = STEPS, batch: int = BATCH) -> float:
    """Train all weights in place on random lessons; returns the last loss (nats per token)."""
    rng = Random(f"observer {seed}")

    def examples() -> list[Example]:
        return [encoder.encode_turn(*draw_lesson(rng)) for _ in range(batch)]

    with fast_vision(model):
        return teach(
            model, encoder, drawn_ahead(examples, steps), steps, LEARNING_RATE,
            name="tiny observer:", rise=_RISE, log_every_s=_LOG_EVERY_S,
        )  # fmt: skip


def verdict_odds(model: Any, encoder: DialogueEncoder, pairs: Sequence[StatedPair]) -> tuple[np.ndarray, np.ndarray]:
    """(float32 [N, 2], bool [N]): how likely False and True are once the right counts are written down, and whether the counts
    that the model would write itself (greedily) are the right ones.
    """
    odds: list[np.ndarray] = []
    right: list[bool] = []
    for start in range(0, len(pairs), _ROWS):
        part = pairs[start : start + _ROWS]
        examples = [encoder.encode_turn(*verdict_lesson(pair, verdict)) for pair in part for verdict in (False, True)]
        arguments, targets = collate(examples, encoder.pad_token_id)
        with torch.no_grad():
            logprobs = token_logprobs(model, arguments, targets).sum(1).reshape(-1, 2)
            hidden = model.model(**arguments, use_cache=False).last_hidden_state[:, :-1]
            missed = (model.lm_head(hidden).argmax(-1) != arguments["input_ids"][:, 1:]) & targets[:, 1:]
        odds.append(torch.softmax(logprobs, 1).numpy())
        # Of the two verdicts one is always missed; whoever misses nothing else has written the counts.
        right += (missed.sum(1).reshape(-1, 2).min(1).values == 0).tolist()
    return np.concatenate(odds), np.array(right)


def log_accuracy(model: Any, encoder: DialogueEncoder, loss: float, seconds: float) -> None:
    """Log how often the model writes the right counts, and how likely the right verdict is after them, which should be chance."""
    pairs = [pair_item("test", index) for index in range(256)]
    odds, right = verdict_odds(model, encoder, pairs)
    chosen = odds[np.arange(len(pairs)), [int(pair.truth) for pair in pairs]].mean()
    logger.info(
        "tiny observer: done in %.0f s, loss %.3f; right counts %.2f, the right verdict %.2f (chance 0.50)",
        seconds, loss, right.mean(), chosen,
    )  # fmt: skip
