"""How well the tiny labeller compares poles."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rl_vlm.models.supervised import DialogueEncoder, collate, token_logprobs
from rl_vlm.zoo.poles.lesson import comparison, random_angle, right_label

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
    clear = truth != -1
    return float((final == truth)[clear].mean()) >= _GOOD
