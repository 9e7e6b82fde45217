"""Attention for models of all families: groups of query heads, and packed rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention.varlen import varlen_attn

# Attention in which several query heads share a key head, by a kernel that does not write out all scores.


def needs_own_keys(query: Tensor) -> bool:
    """Whether every query head must be given keys and values of its own.

    Of a GPU's kernels only those for 16 bits know groups of heads: for float32 torch would write out all scores.
    """
    return query.device.type == "cuda" and query.dtype == torch.float32


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """[B, heads, L, head_dim] of query, and of key and value [B, key heads, L, head_dim]; with a gradient."""
    if needs_own_keys(query):
        groups = query.shape[1] // key.shape[1]
        key, value = (side.repeat_interleave(groups, dim=1) for side in (key, value))
    return functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """As `causal_attention`, where a mask bool [L, K] says what is seen of key and value [B, key heads, K, head_dim].

    Query heads that share a key head are passed as further queries, because keys repeated for each would be kept for
    the backward pass. Of a long sequence the repeated mask would be larger.
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

    mask: bool (what is seen) or a bias [B, 1, 1, L]; None where all is seen. Query heads that share a key head are
    passed as the query dimension: kernels that take a mask know no groups.
    """
    rows, key_heads, _, size = key.shape
    mixed = functional.scaled_dot_product_attention(
        query.reshape(rows, key_heads, -1, size), key, value, attn_mask=mask, scale=scale
    )
    return mixed.reshape(rows, -1)


# Attention over packed rows without a mask [B, 1, L, L]: each continuation sees the shared prompt and itself.
#
# A row's tokens are its prompt (segment 0), continuations (1, 2, ...) one after the other, and padding (-1). Prompt
# and first continuation are plain causal attention; each further continuation is a call of its own, whose keys are the
# prompt's and its own. On a GPU in 16 bits all of them are one call. (Flex attention takes segments as its mask, but
# rejects gradients on a CPU.)

# The later versions of torch reject groups of heads unless asked for them, and the earlier ones take them.
_GROUPS: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
_AMPERE = (8, 0)  # the first GPUs with flash attention


def takes_sequences(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether flash attention computes sequences of different lengths there, so that packed rows are one call."""
    is_wide = dtype not in (torch.bfloat16, torch.float16) or head_dim > 256
    return device.type == "cuda" and not is_wide and torch.cuda.get_device_capability(device) >= _AMPERE


NAME = "rl_vlm_segments"  # as transformers knows it


@dataclass(frozen=True, slots=True)
class Continuation:
    """A later continuation [start, stop) of a row whose prompt has `prompt` tokens."""

    prompt: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Sequences:
    """Packed rows as sequences one after the other, each causal at the end of its keys: prompt with first continuation,
    every later continuation (and padding, of which nothing is asked) after the prompt's keys once more."""

    pieces: list[list[int]]  # by row, the lengths in which its keys are cut: prompt, continuations, padding
    query_ends: Tensor  # int32 [sequences + 1], cumulative
    key_ends: Tensor
    longest: tuple[int, int]  # queries and keys

    @classmethod
    def of(
        cls, later: Mapping[int, Sequence[Continuation]], rows: int, length: int, device: torch.device | str
    ) -> Sequences:
        """Of rows of that length, by the continuations after the first."""
        pieces, queries, keys = [], [0], [0]
        for number in range(rows):
            members = later.get(number, ())
            first, end = (members[0].start, members[-1].stop) if members else (length, length)
            prompt = members[0].prompt if members else 0
            own = [*(one.stop - one.start for one in members), *([length - end] if end < length else ())]
            pieces.append([prompt, first - prompt, *own])
            queries += [first, *own]
            keys += [first, *(prompt + size for size in own)]
        of_queries, of_keys = (
            torch.tensor(np.cumsum(sizes), dtype=torch.int32, device=device) for sizes in (queries, keys)
        )
        return cls(pieces, of_queries, of_keys, (max(queries), max(keys)))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """[B, L, heads, head_dim] of query [B, heads, L, head_dim], and key and value [B, key heads, L, head_dim]."""
        rows, heads, length, size = query.shape
        mixed: Tensor = varlen_attn(  # type: ignore[assignment]
            query.transpose(1, 2).reshape(-1, heads, size),
            self._with_prompts(key),
            self._with_prompts(value),
            self.query_ends,
            self.key_ends,
            *self.longest,
            scale=scale,
            window_size=(-1, 0),
            **_GROUPS,
        )
        return mixed.view(rows, length, heads, size)

    def _with_prompts(self, side: Tensor) -> Tensor:
        """Keys or values [B, key heads, L, head_dim] as [keys of all sequences, key heads, head_dim]."""
        found: list[Tensor] = []
        for row, sizes in zip(side.transpose(1, 2), self.pieces, strict=True):
            prompt, first, *later = row.split(sizes)
            found += [prompt, first, *(part for piece in later for part in (prompt, piece))]
        return torch.cat(found)


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Where the continuations after the first stand, by row, and a mask that all of them share."""

    later: dict[int, list[Continuation]]
    longest_prompt: int
    mask: Tensor  # bool [longest, longest prompt + longest]: prompt, then causal
    sequences: Sequences  # the rows as a kernel for sequences of different lengths takes them

    @classmethod
    def of(cls, segments: np.ndarray, device: torch.device | str = "cpu") -> SegmentLayout:
        """From segments int [B, L] in this order."""
        later: dict[int, list[Continuation]] = {}
        for number, row in enumerate(segments):
            real = row[: int((row >= 0).sum())]
            kinds, starts = np.unique(real, return_index=True)
            ends = [*starts[1:].tolist(), len(real)]
            prompt = ends[0] if len(kinds) and kinds[0] == 0 else 0
            first = 2 if prompt else 1
            for start, stop in list(zip(starts.tolist(), ends, strict=True))[first:]:
                later.setdefault(number, []).append(Continuation(prompt, start, stop))
        every = [continuation for members in later.values() for continuation in members]
        longest = max((continuation.stop - continuation.start for continuation in every), default=0)
        longest_prompt = max((continuation.prompt for continuation in every), default=0)
        mask = torch.ones(longest, longest_prompt + longest, dtype=torch.bool, device=device)
        sequences = Sequences.of(later, len(segments), segments.shape[1], device)
        return cls(later, longest_prompt, mask.tril(longest_prompt), sequences)

    def is_faster(self, length: int, call_cost: int) -> bool:
        """Whether this is cheaper than dense masks of `length`; a further call costs as much as so many pairs."""
        saved = 0
        for members in self.later.values():
            sizes = [(one.prompt, one.stop - one.start) for one in members]
            spent = call_cost * len(members) + sum(own * (prompt + own) for prompt, own in sizes)
            saved += length**2 - members[0].start ** 2 - spent
        return saved >= 0

    def mask_of(self, continuation: Continuation) -> Tensor:
        """bool [queries, prompt + queries]: a view."""
        length = continuation.stop - continuation.start
        return self.mask[:length, self.longest_prompt - continuation.prompt : self.longest_prompt + length]


def dense_mask(segments: Tensor) -> Tensor:
    """The same as a mask bool [B, 1, L, L] of segments [B, L]: the reference."""
    length = segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    key, query = segments[:, None, None, :], segments[:, None, :, None]
    return causal & ((key == 0) | (key == query))


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    segments: SegmentLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: [B, L, heads, head_dim] of query, key and value [B, heads, L, head_dim]; its
    own `sdpa` without `segments`. Outputs of padding are unspecified, and finite."""
    if segments is None:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward  # an import of seconds

        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)  # type: ignore[no-any-return]

    def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return causal_attention(query, key, value, scaling).transpose(1, 2).contiguous()

    packed = segments.later
    if not packed:
        return causal(query, key, value), None
    if takes_sequences(query.device, query.dtype, query.shape[-1]):
        return segments.sequences.attend(query, key, value, scaling), None
    by_number: dict[int, Tensor] = {}
    plain = [number for number in range(len(query)) if number not in packed]
    if plain:
        by_number |= dict(zip(plain, causal(query[plain], key[plain], value[plain]), strict=True))
    for number, members in packed.items():
        query_row, key_row, value_row = query[number, None], key[number, None], value[number, None]
        first = members[0].start
        pieces = [causal(query_row[:, :, :first], key_row[:, :, :first], value_row[:, :, :first])[0]]
        for continuation in members:
            own = slice(continuation.start, continuation.stop)
            keys, values = (
                torch.cat([side[:, :, : continuation.prompt], side[:, :, own]], dim=2) for side in (key_row, value_row)
            )
            attended = masked_attention(query_row[:, :, own], keys, values, segments.mask_of(continuation), scaling)
            pieces.append(attended[0].transpose(0, 1))
        padding = query.shape[2] - members[-1].stop
        pieces.append(pieces[0].new_zeros(padding, *pieces[0].shape[1:]))
        by_number[number] = torch.cat(pieces)
    return torch.stack([by_number[number] for number in range(len(query))]), None
