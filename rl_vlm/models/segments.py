"""Attention over packed rows without a mask [B, 1, L, L]: each continuation sees the shared prompt and itself.

A row's tokens are its prompt (segment 0), continuations (1, 2, ...) one after the other, and padding (-1). Prompt and first
continuation are plain causal attention, of all rows in one call; each further continuation is a call of its own, whose keys are
the prompt's and its own. So a packed row pays for what is seen, not for its squared length. The calls are torch's
scaled_dot_product_attention on every device. (Flex attention takes such segments as its mask, but refuses gradients on a CPU.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from rl_vlm.models.grouped_heads import causal_attention, masked_attention
from rl_vlm.types import UserInputError

NAME = "rl_vlm_segments"  # as transformers knows it


@dataclass(frozen=True, slots=True)
class Continuation:
    """A later continuation [start, stop) of a row whose prompt has `prompt` tokens."""

    row: int
    prompt: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Where the continuations after the first stand, in the order of rows, and a mask that all of them share.

    mask: bool [longest, longest prompt + longest]; the last columns are causal, those before are the prompt's.
    """

    later: tuple[Continuation, ...]
    longest_prompt: int
    mask: Tensor

    @classmethod
    def of(cls, segments: np.ndarray, device: torch.device | str = "cpu") -> SegmentLayout:
        """From segments int [B, L]. Raises UserInputError where they are not in the order that the module's docstring gives."""
        later: list[Continuation] = []
        for number, row in enumerate(segments):
            real = row[: int((row >= 0).sum())]
            if (np.diff(real) < 0).any() or (real < 0).any():
                raise UserInputError(
                    f"Row {number} is not packed as prompt, continuations, padding: sort its tokens by segment."
                )
            kinds, starts = np.unique(real, return_index=True)
            ends = [*starts[1:].tolist(), len(real)]
            prompt = ends[0] if len(kinds) and kinds[0] == 0 else 0
            first = 2 if prompt else 1
            for start, stop in list(zip(starts.tolist(), ends, strict=True))[first:]:
                later.append(Continuation(number, prompt, start, stop))
        longest = max((one.stop - one.start for one in later), default=0)
        longest_prompt = max((one.prompt for one in later), default=0)
        mask = torch.ones(longest, longest_prompt + longest, dtype=torch.bool, device=device)
        return cls(tuple(later), longest_prompt, mask.tril(longest_prompt))

    def pays(self, length: int, call_cost: int) -> bool:
        """Whether this is cheaper than a dense mask over rows of `length` tokens.

        call_cost: how many query-key pairs are computed in the time that one more call takes.
        """
        saved = 0
        for members in _by_row(self.later).values():
            spent = sum((one.stop - one.start) * (one.prompt + one.stop - one.start) for one in members)
            saved += length**2 - members[0].start ** 2 - spent
        return saved >= call_cost * len(self.later)

    def mask_of(self, one: Continuation) -> Tensor:
        """bool [queries, prompt + queries]: a view."""
        length = one.stop - one.start
        return self.mask[:length, self.longest_prompt - one.prompt : self.longest_prompt + length]


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
    """transformers' attention function: [B, L, heads, head_dim] of query [B, heads, L, head_dim], key and value.

    Without `segments` it is transformers' own `sdpa`. Outputs of padding are unspecified, and finite.
    """
    if segments is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)  # type: ignore[no-any-return]

    def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return causal_attention(query, key, value, scaling).transpose(1, 2).contiguous()

    packed = _by_row(segments.later)
    if not packed:
        return causal(query, key, value), None
    found: dict[int, Tensor] = {}
    plain = [number for number in range(len(query)) if number not in packed]
    if plain:
        found |= dict(zip(plain, causal(query[plain], key[plain], value[plain]), strict=True))
    for number, members in packed.items():
        query_row, key_row, value_row = query[number, None], key[number, None], value[number, None]
        first = members[0].start
        pieces = [causal(query_row[:, :, :first], key_row[:, :, :first], value_row[:, :, :first])[0]]
        for one in members:
            own = slice(one.start, one.stop)
            keys, values = (
                torch.cat([side[:, :, : one.prompt], side[:, :, own]], dim=2) for side in (key_row, value_row)
            )
            attended = masked_attention(query_row[:, :, own], keys, values, segments.mask_of(one), scaling)
            pieces.append(attended[0].transpose(0, 1))
        padding = query.shape[2] - members[-1].stop
        pieces.append(pieces[0].new_zeros(padding, *pieces[0].shape[1:]))
        found[number] = torch.cat(pieces)
    return torch.stack([found[number] for number in range(len(query))]), None


def _by_row(later: Sequence[Continuation]) -> dict[int, list[Continuation]]:
    found: dict[int, list[Continuation]] = {}
    for one in later:
        found.setdefault(one.row, []).append(one)
    return found


def use_segments(model: Any) -> None:
    """Let the language model of `model` attend by `segment_attention`; its vision tower stays as it is."""
    AttentionInterface.register(NAME, segment_attention)
    model.set_attn_implementation({"text_config": NAME})
