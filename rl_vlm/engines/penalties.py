"""Penalties on tokens that occurred before: changes of single rows of logits, before temperature."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rl_vlm.types import SamplingParams


def penalise(
    logits: Tensor, row: int, sampling: SamplingParams, prompt_ids: np.ndarray, sampled: Sequence[int] | np.ndarray
) -> None:
    """Change one row of logits [R, V] in place, in vLLM's order.

    Repetition (CTRL, arXiv 1909.05858): logits of tokens in the prompt or the sample are divided by it where positive and
    multiplied where negative. Frequency and presence (OpenAI): `frequency * count + presence` is subtracted from those of
    the sample's tokens.
    """
    ids, counts = np.unique(np.asarray(sampled, dtype=np.int64), return_counts=True)
    if sampling.repetition_penalty != 1:
        seen = torch.from_numpy(np.union1d(np.asarray(prompt_ids, dtype=np.int64), ids)).to(logits.device)
        values = logits[row, seen]
        penalty = sampling.repetition_penalty
        logits[row, seen] = torch.where(values > 0, values / penalty, values * penalty)
    if len(ids) and (sampling.frequency_penalty or sampling.presence_penalty):
        minus = sampling.frequency_penalty * counts + sampling.presence_penalty
        logits[row, torch.from_numpy(ids).to(logits.device)] -= torch.from_numpy(minus).to(logits)
