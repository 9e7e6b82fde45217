"""Choosing tokens from logits: greedy, temperature, top-k, top-p, by inverse transform sampling."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Chosen(NamedTuple):
    """One token per row: ids int64 [R], their log-probabilities float32 [R], and the log-distribution [R, V] that they
    were drawn from."""

    tokens: Tensor
    logprobs: Tensor
    distribution: Tensor


def choose_tokens(
    logits: Tensor,
    temperature: Tensor,
    top_p: Tensor | None,
    top_k: Tensor | None,
    uniform: Tensor,
    min_p: Tensor | None = None,
) -> Chosen:
    """Choose one token per row.

    logits float32 [R, V] with forbidden tokens at -inf; temperature float32 [R], 0 = greedy; top_p float32 [R] and
    top_k int64 [R] (0 = off), min_p float32 [R] (0 = off) or None when no row uses them; uniform float64 [R] in [0, 1).
    Log-probabilities are those of the distribution that the token was drawn from, min-p, top-k and top-p included; a
    greedy token's is taken at temperature 1.
    """
    greedy = temperature == 0
    scaled = logits / torch.where(greedy, torch.ones_like(temperature), temperature)[:, None]
    if min_p is not None:
        # Before top-p, as vLLM does: tokens that min-p removes do not count towards its mass.
        floor = scaled.amax(dim=-1, keepdim=True) + min_p.log()[:, None]
        scaled = scaled.masked_fill((scaled < floor) & ~greedy[:, None], float("-inf"))
    if top_k is not None or top_p is not None:
        scaled = _restrict(scaled, top_p, top_k, greedy)
    logprobs = torch.log_softmax(scaled, dim=-1)
    num_greedy = int(greedy.sum())
    # Of a row's running sum in float64, over a large vocabulary, greedy rows need nothing.
    tokens = scaled.argmax(dim=-1) if num_greedy else _drawn(logprobs, uniform)
    if 0 < num_greedy < len(greedy):
        tokens = torch.where(greedy, tokens, _drawn(logprobs, uniform))
    return Chosen(tokens, logprobs.gather(1, tokens[:, None])[:, 0], logprobs)


def _drawn(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Token ids int64 [R] at which the running sum of the probabilities [R, V] passes uniform [R]."""
    # float64, so that a tail of many small probabilities is not lost in the running sum.
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    drawn = torch.searchsorted(cumulative, uniform[:, None] * total, right=True)[:, 0]
    # Rounding can put u·total on the total itself: stay on the last token that has any probability.
    last = torch.searchsorted(cumulative, total)[:, 0]
    return torch.minimum(drawn, last)


def most_likely(distribution: Tensor, counts: list[int]) -> list[tuple[tuple[int, float], ...]]:
    """Per row of a log-distribution [R, V], the `counts[r]` most likely tokens as (id, log-probability), best first.

    Tokens without any probability are left out.
    """
    values, ids = distribution.topk(min(max(counts), distribution.shape[1]), dim=-1)
    rows = zip(ids.tolist(), values.tolist(), counts, strict=True)
    return [
        tuple((token, value) for token, value in zip(found[:count], scores[:count], strict=True) if value > -torch.inf)
        for found, scores, count in rows
    ]


def _restrict(scaled: Tensor, top_p: Tensor | None, top_k: Tensor | None, greedy: Tensor) -> Tensor:
    """Set what top-k and then top-p (nucleus, arXiv 1904.09751) leave out to -inf."""
    ordered, order = scaled.sort(dim=-1, descending=True)
    drop = torch.zeros_like(scaled, dtype=torch.bool)
    if top_k is not None:
        rank = torch.arange(scaled.shape[1], device=scaled.device)[None, :]
        drop |= (top_k[:, None] > 0) & (rank >= top_k[:, None])
    if top_p is not None:
        kept = torch.softmax(ordered.masked_fill(drop, float("-inf")), dim=-1)
        # Keep tokens until the mass before them reaches p: the first token always stays. A row without top-p loses
        # nothing: rounding can bring its running sum to 1 before the last tokens.
        drop |= (top_p[:, None] < 1) & ((kept.cumsum(dim=-1) - kept) >= top_p[:, None])
    drop[:, 0] = False
    drop &= ~greedy[:, None]
    return scaled.masked_fill(torch.zeros_like(drop).scatter(1, order, drop), float("-inf"))
