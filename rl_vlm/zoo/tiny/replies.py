"""How likely whole replies are to a tiny model, and which it would write itself: what warm starts report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rl_vlm.models.supervised import DialogueEncoder, Part, collate, missed, token_logprobs

_ROWS = 64  # per forward pass

Prompt = Sequence[Part]  # images (uint8 [height, width, 3]) and texts of one message


def option_odds(
    model: Any, encoder: DialogueEncoder, prompts: Sequence[Prompt], replies: Sequence[Sequence[str]]
) -> tuple[np.ndarray, np.ndarray]:
    """(float32 [N, K], bool [N]): how likely each of K replies to each of N prompts is beside the others, end of turn included, and
    whether the greedy reply is one of them: of replies that differ in their end alone, whether their common beginning is written rightly.
    """
    odds: list[np.ndarray] = []
    written: list[np.ndarray] = []
    pairs, options = list(zip(prompts, replies, strict=True)), len(replies[0])
    for start in range(0, len(pairs), step := max(_ROWS // options, 1)):
        examples = [encoder.encode_turn(prompt, reply) for prompt, its in pairs[start : start + step] for reply in its]
        arguments, targets = collate(examples, encoder.pad_token_id)
        with torch.no_grad():
            logprobs = token_logprobs(model, arguments, targets).sum(1).reshape(-1, options)
        odds.append(torch.softmax(logprobs, 1).numpy())
        misses = missed(model, arguments, targets).sum(1).reshape(-1, options)
        written.append((misses == 0).any(1).numpy())
    return np.concatenate(odds), np.concatenate(written)


def greedily_right(
    model: Any, encoder: DialogueEncoder, prompts: Sequence[Prompt], answers: Sequence[str]
) -> np.ndarray:
    """bool [N]: whether the greedy reply to each prompt is the answer, token for token."""
    right: list[np.ndarray] = []
    pairs = list(zip(prompts, answers, strict=True))
    for start in range(0, len(pairs), _ROWS):
        examples = [encoder.encode_turn(prompt, answer) for prompt, answer in pairs[start : start + _ROWS]]
        right.append((~missed(model, *collate(examples, encoder.pad_token_id)).any(1)).numpy())
    return np.concatenate(right)
