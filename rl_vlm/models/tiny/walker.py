"""The tiny walker's warm start: it learns what is where on a grid and to answer with a move, not which move is good."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rl_vlm.envs import gridwalk_data as data
from rl_vlm.envs.gridwalk_data import MOVES, Difficulty, Grid, grid_item
from rl_vlm.models.supervised import DialogueEncoder, Example, collate, token_logprobs
from rl_vlm.models.tiny.walks import described, draw_walk, random_question
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
    """Train all weights in place on random walks; returns the last loss (nats per token)."""
    rng = np.random.default_rng([seed, 3])

    def examples() -> list[Example]:
        return [encoder.encode_chat(draw_walk(rng)) for _ in range(batch)]

    with fast_vision(model):
        return teach(
            model, encoder, drawn_ahead(examples, steps), steps, LEARNING_RATE,
            name="tiny walker:", rise=_RISE, log_every_s=_LOG_EVERY_S,
        )  # fmt: skip


def reply_logprobs(
    model: Any, encoder: DialogueEncoder, grids: Sequence[Grid], question: str, replies: Sequence[Sequence[str]]
) -> np.ndarray:
    """float32 [N, K]: the log-probability of each of K replies per grid, end of turn included, to a question about it."""
    found: list[np.ndarray] = []
    pairs = list(zip(grids, replies, strict=True))
    for start in range(0, len(pairs), _ROWS):
        examples = [
            encoder.encode_turn((data.render(grid), question), reply)
            for grid, its_replies in pairs[start : start + _ROWS]
            for reply in its_replies
        ]
        arguments, targets = collate(examples, encoder.pad_token_id)
        with torch.no_grad():
            found.append(token_logprobs(model, arguments, targets).sum(1).reshape(-1, len(replies[0])).numpy())
    return np.concatenate(found)


def perception_accuracy(model: Any, encoder: DialogueEncoder, num_questions: int = 200) -> float:
    """The share of questions about grids of the test split to which the greedy reply is right, word for word."""
    rng = np.random.default_rng(12345)
    right: list[bool] = []
    for start in range(0, num_questions, _ROWS):
        grids = [grid_item(Difficulty(), "test", index) for index in range(start, min(start + _ROWS, num_questions))]
        asked = [(grid, *random_question(rng, grid)) for grid in grids]
        examples = [encoder.encode_turn((data.render(grid), question), answer) for grid, question, answer in asked]
        arguments, targets = collate(examples, encoder.pad_token_id)
        with torch.no_grad():
            hidden = model.model(**arguments, use_cache=False).last_hidden_state[:, :-1]
            likeliest = model.lm_head(hidden).argmax(-1)
        wrong = (likeliest != arguments["input_ids"][:, 1:]) & targets[:, 1:]
        right += (~wrong.any(1)).tolist()
    return float(np.mean(right))


def move_probabilities(model: Any, encoder: DialogueEncoder, grids: Sequence[Grid]) -> np.ndarray:
    """float32 [N, 4]: how likely each of MOVES is at the start of a walk, once what there is to see is rightly written down."""
    replies = [[f"{described(grid)}: {move}" for move in MOVES] for grid in grids]
    likely = np.exp(reply_logprobs(model, encoder, grids, data.QUESTION, replies))
    return np.asarray(likely / likely.sum(1, keepdims=True))


def log_accuracy(model: Any, encoder: DialogueEncoder, loss: float, seconds: float) -> None:
    """Log how often the model is right about what is where, and how likely a good move is, which should be chance."""
    grids = [grid_item(Difficulty(), "test", index) for index in range(200)]
    good = np.array([[move in grid.best_moves() for move in MOVES] for grid in grids])
    chosen = float((move_probabilities(model, encoder, grids) * good).sum(1).mean())
    logger.info(
        "tiny walker: done in %.0f s, loss %.3f; right about what is where %.2f; a good move %.2f (chance %.2f)",
        seconds, loss, perception_accuracy(model, encoder), chosen, good.mean(),
    )  # fmt: skip
