"""Rotary positions (RoFormer, arXiv 2104.09864) with one pass less than transformers' functions."""

from __future__ import annotations

import torch
from torch import Tensor


def rolled_sin(sin: Tensor) -> Tensor:
    """The sine table [..., head_dim] for `rotate`: rotate_half maps (x1, x2) to (-x2, x1), a roll by half whose minus sign
    stands in the table."""
    half = sin.shape[-1] // 2
    return torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., head_dim] turned by the angles of cos and `rolled_sin`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
