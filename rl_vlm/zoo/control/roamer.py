"""The tiny roamer's warm start: it learns what is where in MiniGrid's empty rooms and to answer with an action word, not which."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_vlm.models.supervised import DialogueEncoder
from rl_vlm.zoo.control.lesson import (
    QUESTION,
    WORDS,
    Room,
    described,
    draw_tour,
    random_question,
    random_room,
    render,
    side,
)
from rl_vlm.zoo.tiny.replies import greedily_right, option_odds
from rl_vlm.zoo.tiny.warmstart import teach_drawn

STEPS = 600
BATCH = 48
SIZE = 6  # of the rooms that are asked about, walls included

logger = logging.getLogger(__name__)


def warm_start(model: Any, encoder: DialogueEncoder, seed: int, steps: int = STEPS, batch: int = BATCH) -> float:
    """Train all weights in place on random tours; returns the last loss (nats per token)."""
    rng = np.random.default_rng([seed, 5])
    return teach_drawn(model, encoder, lambda: encoder.encode_chat(draw_tour(rng)), steps, batch, "tiny roamer:")


def test_rooms(count: int) -> list[Room]:
    """Rooms whose pictures were never shown."""
    rng = np.random.default_rng(12345)
    return [random_room(rng, (SIZE,), "test") for _ in range(count)]


def perception_accuracy(model: Any, encoder: DialogueEncoder, num_questions: int = 200) -> float:
    """The share of questions about rooms of the test split to which the greedy reply is right, word for word."""
    rng = np.random.default_rng(54321)
    rooms = test_rooms(num_questions)
    questions, answers = zip(*(random_question(rng, room) for room in rooms), strict=True)
    prompts = [(render(room), question) for room, question in zip(rooms, questions, strict=True)]
    return float(greedily_right(model, encoder, prompts, answers).mean())


def word_probabilities(model: Any, encoder: DialogueEncoder, rooms: Sequence[Room]) -> np.ndarray:
    """float32 [N, 3]: how likely each of WORDS is in a first turn, once what there is to see is rightly written down."""
    prompts = [(render(room), QUESTION) for room in rooms]
    replies = [[described(room, word) for word in WORDS] for room in rooms]
    return option_odds(model, encoder, prompts, replies)[0]


def log_accuracy(model: Any, encoder: DialogueEncoder, loss: float, seconds: float) -> None:
    """Log how often the model is right about what is where, and how likely `forward` is towards the goal, which should be chance."""
    rooms = [room for room in test_rooms(600) if "ahead" in side(room)]
    chosen = word_probabilities(model, encoder, rooms)[:, WORDS.index("forward")].mean()
    logger.info(
        "tiny roamer: done in %.0f s, loss %.3f; right about what is where %.2f; forward towards the goal %.2f (chance 0.33)",
        seconds, loss, perception_accuracy(model, encoder), chosen,
    )  # fmt: skip
