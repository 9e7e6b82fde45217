"""Micro-batches that count for nothing, so that all learners make as many passes through a model whose layers they share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rl_vlm.learning.batching import MicroBatch


def missing_passes(counts: Sequence[int], device: torch.device) -> list[int]:
    """How many micro-batches this learner has fewer than the one with most, for each optimiser step; all learners call this."""
    own = torch.tensor(counts, dtype=torch.int64, device=device)
    most: Tensor = own.clone()
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    return (most - own).tolist()  # type: ignore[no-any-return]


def padding_batch(token_id: int) -> MicroBatch:
    """One row of two tokens, the second sampled, with weight and advantage 0. `token_id` is one that the policy may sample."""
    nothing, first = np.zeros(1, dtype=np.float32), np.zeros(1, dtype=np.int64)
    return MicroBatch(
        input_ids=np.full((1, 2), token_id, dtype=np.int64),
        position_ids=np.broadcast_to(np.arange(2, dtype=np.int64), (3, 1, 2)).copy(),
        segments=np.array([[0, 1]], dtype=np.int16),
        images=[],
        row=first,
        column=first,
        target=np.full(1, token_id, dtype=np.int64),
        behaviour=nothing,
        sample=first,
        turn=first,
        counts=False,
        weight=nothing,
        advantage=nothing,
        returns=np.full(1, np.nan, dtype=np.float32),
    )
