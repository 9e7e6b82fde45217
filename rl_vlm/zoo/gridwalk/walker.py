"""The tiny walker's warm start: it learns what is where on a grid and to answer with a move, not which move is good."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_vlm.models.supervised import DialogueEncoder
from rl_vlm.zoo.gridwalk import data
from rl_vlm.zoo.gridwalk.data import MOVES, Difficulty, Grid, grid_item
from rl_vlm.zoo.gridwalk.lesson import described, draw_walk, random_question
from rl_vlm.zoo.tiny.replies import greedily_right, option_odds
from rl_vlm.zoo.tiny.warmstart import teach_drawn

STEPS = 700
BATCH = 40

logger = logging.getLogger(__name__)


def warm_start(model: Any, encoder: DialogueEncoder, seed: int, steps: int = STEPS, batch: int = BATCH) -> float:
    """Train all weights in place on random walks; returns the last loss (nats per token)."""
    rng = np.random.default_rng([seed, 3])
    return teach_drawn(model, encoder, lambda: encoder.encode_chat(draw_walk(rng)), steps, batch, "tiny walker:")


def perception_accuracy(model: Any, encoder: DialogueEncoder, num_questions: int = 200) -> float:
    """The share of questions about grids of the test split to which the greedy reply is right, word for word."""
    rng = np.random.default_rng(12345)
    grids = [grid_item(Difficulty(), "test", index) for index in range(num_questions)]
    questions, answers = zip(*(random_question(rng, grid) for grid in grids), strict=True)
    prompts = [(data.render(grid), question) for grid, question in zip(grids, questions, strict=True)]
    return float(greedily_right(model, encoder, prompts, answers).mean())


def move_probabilities(model: Any, encoder: DialogueEncoder, grids: Sequence[Grid]) -> np.ndarray:
    """float32 [N, 4]: how likely each of MOVES is at the start of a walk, once what there is to see is rightly written down."""
    replies = [[f"{described(grid)}: {move}" for move in MOVES] for grid in grids]
    prompts = [(data.render(grid), data.QUESTION) for grid in grids]
    return option_odds(model, encoder, prompts, replies)[0]


def log_accuracy(model: Any, encoder: DialogueEncoder, loss: float, seconds: float) -> None:
    """Log how often the model is right about what is where, and how likely a good move is, which should be chance."""
    grids = [grid_item(Difficulty(), "test", index) for index in range(200)]
    good = np.array([[move in grid.best_moves() for move in MOVES] for grid in grids])
    chosen = float((move_probabilities(model, encoder, grids) * good).sum(1).mean())
    logger.info(
        "tiny walker: done in %.0f s, loss %.3f; right about what is where %.2f; a good move %.2f (chance %.2f)",
        seconds, loss, perception_accuracy(model, encoder), chosen, good.mean(),
    )  # fmt: skip
