"""Lessons of the tiny labeller: to say which of two drawn poles is nearer to upright.

Angles are in degrees, drawn from a mixture of those in runs: any angle, nearly upright, and at the limits.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from rl_vlm.control_envs.cartpole import draw_cartpole
from rl_vlm.labelling.prompts import task_prompts
from rl_vlm.models.supervised import DialogueEncoder, collate, token_logprobs
from rl_vlm.zoo.tiny.teach import Draw, Exchange

CORPUS: tuple[str, ...] = ()  # the tiny tokenizer has its words already
_TASK = task_prompts("cartpole-tiny")
ANGLE_QUESTION = " How far from upright?"

SIZE = 64  # pixels of the pictures
MAX_ANGLE = 30.0
# Smaller differences are answered -1. It is below the 3 degrees up to which evaluation counts a tie, so that pairs just
# above these are decided.
TIE_DEGREES = 2.0
# One pole in the first lessons and in a share of the later ones: else comparing two takes three times as long to learn.
_FIRST, _ANGLE_SHARE = 6000, 0.2
_BUCKET = 3.0  # degrees of one answer to ANGLE_QUESTION
_GOOD = 0.9  # share of clear pairs that it must be right on
_CHOICES = (0, 1, -1)


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


def can_compare(model: Any, encoder: DialogueEncoder) -> bool:
    """Whether it is right about nearly all new pairs that differ clearly, when asked in both orders."""
    rng = np.random.default_rng(12345)
    pairs = [(random_angle(rng), random_angle(rng)) for _ in range(200)]
    given = labels_of(model, encoder, pairs)
    swapped = labels_of(model, encoder, [(second, first) for first, second in pairs])
    swapped = np.where(swapped == -1, -1, 1 - swapped)
    final = np.where(given == swapped, given, -1)
    truth = np.array([right_label(first, second, tie=3.0) for first, second in pairs])
    return float((final == truth)[truth != -1].mean()) >= _GOOD


def draw_lesson(rng: np.random.Generator, angle_share: float) -> Exchange:
    """A comparison of two poles, or the angle of one."""
    if rng.random() < angle_share:
        angle = random_angle(rng)
        return Exchange("user", (pole(angle), ANGLE_QUESTION), str(min(9, int(abs(angle) / _BUCKET))))
    return comparison(random_angle(rng), random_angle(rng))


def comparison(first: float, second: float) -> Exchange:
    asked = _TASK.templates
    parts = (asked.first, pole(first), asked.second, pole(second), _TASK.fill(asked.decide))
    return Exchange("user", parts, str(right_label(first, second, TIE_DEGREES)))


def right_label(first: float, second: float, tie: float) -> int:
    """0 or 1 for the pole that is nearer to upright, -1 if they differ by less than `tie` degrees."""
    difference = abs(first) - abs(second)
    return -1 if abs(difference) < tie else int(difference > 0)


def random_angle(rng: np.random.Generator) -> float:
    """Rounded to a tenth of a degree, so that pictures repeat."""
    draw = rng.random()
    if draw < 0.5:
        angle = rng.uniform(-MAX_ANGLE, MAX_ANGLE)
    elif draw < 0.85:
        angle = rng.normal(0.0, 6.0)
    else:
        angle = float(rng.choice([-MAX_ANGLE, MAX_ANGLE]))
    return round(float(np.clip(angle, -MAX_ANGLE, MAX_ANGLE)), 1)


@lru_cache(maxsize=1024)
def pole(angle: float) -> np.ndarray:
    """uint8 [SIZE, SIZE, 3]; not to be written to."""
    frame = draw_cartpole(math.radians(angle), SIZE)
    frame.flags.writeable = False
    return frame


def drawer(seed: int) -> Draw:
    rng, drawn = np.random.default_rng([seed, 2]), itertools.count()
    return lambda: [draw_lesson(rng, 1.0 if next(drawn) < _FIRST else _ANGLE_SHARE)]
