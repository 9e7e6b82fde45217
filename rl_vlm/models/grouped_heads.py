"""Attention in which several query heads share a key head, by a kernel that does not write out all scores."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def needs_own_keys(query: Tensor) -> bool:
    """Whether every query head must be given keys and values of its own.

    Of a GPU's kernels only those for 16 bits know groups of heads. For float32 torch would take the one called math, whose scores
    take gigabytes at a length of thousands.
    """
    return query.device.type == "cuda" and query.dtype == torch.float32


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """[B, heads, L, head_dim] of query [B, heads, L, head_dim], key and value [B, key heads, L, head_dim]; with a gradient."""
    if needs_own_keys(query):
        groups = query.shape[1] // key.shape[1]
        key, value = (side.repeat_interleave(groups, dim=1) for side in (key, value))
    return functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """As `causal_attention`, for key and value [B, key heads, K, head_dim] of which a mask bool [L, K] says what is seen.

    Query heads that share a key head are passed as further queries. Keys repeated for each of them would be kept for the backward
    pass: those of a prompt as often as it has continuations. Of a long sequence the repeated mask would be larger than they are.
    """
    rows, heads, length, size = query.shape
    groups = heads // key.shape[1]
    if length > 2 * key.shape[1] * size:
        key, value = (side.repeat_interleave(groups, dim=1) for side in (key, value))
        groups = 1
    mixed = functional.scaled_dot_product_attention(
        query.reshape(rows, heads // groups, groups * length, size),
        key,
        value,
        attn_mask=mask.repeat(groups, 1)[None, None],
        scale=scale,
    )
    return mixed.reshape(rows, heads, length, size)


def last_token_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """[B, heads * head_dim] of one query per row [B, heads, head_dim], key and value [B, key heads, L, head_dim].

    mask: bool (what is seen) or a bias [B, 1, 1, L]; None where all is seen. Query heads that share a key head are passed as the query
    dimension: keys are not repeated, and kernels that take a mask know no groups.
    """
    rows, key_heads, _, size = key.shape
    mixed = functional.scaled_dot_product_attention(
        query.reshape(rows, key_heads, -1, size), key, value, attn_mask=mask, scale=scale
    )
    return mixed.reshape(rows, -1)
