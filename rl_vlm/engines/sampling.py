"""How the transformers engine chooses tokens from logits: penalties, temperature, top-k, top-p."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_vlm.types import SamplingParams

if TYPE_CHECKING:
    pass


# Penalties on tokens that occurred before: changes of single rows of logits, before temperature.


def penalise(
    logits: Tensor, row: int, sampling: SamplingParams, prompt_ids: np.ndarray, sampled: Sequence[int] | np.ndarray
) -> None:
    """Change one row of logits [R, V] in place, in vLLM's order.

    Repetition (CTRL, arXiv 1909.05858) divides positive logits of tokens in the prompt or the sample and multiplies
    negative ones. Of those of the sample `frequency * count + presence` is subtracted (OpenAI).
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


# Choosing tokens from logits: greedy, temperature, top-k, top-p, by inverse transform sampling.


class Chosen(NamedTuple):
    """One token per row [R], its log-probability float32 [R], and the log-distribution [R, V] that it is from."""

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

    logits float32 [R, V] with forbidden tokens at -inf; temperature float32 [R], 0 = greedy; top_p float32 [R], top_k
    int64 [R] (0 = off), min_p float32 [R] (0 = off), None when no row uses them; uniform float64 [R] in [0, 1). A
    greedy token's log-probability is that at temperature 1.
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
    tokens = scaled.argmax(dim=-1) if num_greedy else _drawn(logprobs, uniform)  # greedy rows need no running sums
    if 0 < num_greedy < len(greedy):
        tokens = torch.where(greedy, tokens, _drawn(logprobs, uniform))
    return Chosen(tokens, logprobs.gather(1, tokens[:, None])[:, 0], logprobs)


def _drawn(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Token ids int64 [R] at which the running sum of the probabilities [R, V] passes uniform [R]."""
    cumulative = torch.softmax(logprobs, -1).cumsum(-1, dtype=torch.float64)  # keeps small tails; exp is slow at -inf
    total = cumulative[:, -1:].contiguous()
    drawn = torch.searchsorted(cumulative, uniform[:, None] * total, right=True)[:, 0]
    # Rounding can put u·total on the total itself: stay on the last token that has any probability.
    last = torch.searchsorted(cumulative, total)[:, 0]
    return torch.minimum(drawn, last)


def most_likely(distribution: Tensor, counts: list[int]) -> list[tuple[tuple[int, float], ...]]:
    """Per row of a log-distribution [R, V] the `counts[r]` most likely tokens: (id, log-probability), best first."""
    values, ids = distribution.topk(min(max(counts), distribution.shape[1]), dim=-1)
    rows = zip(ids.tolist(), values.tolist(), counts, strict=True)
    return [
        tuple((token, value) for token, value in zip(tokens[:count], scores[:count], strict=True) if value > -torch.inf)
        for tokens, scores, count in rows
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
