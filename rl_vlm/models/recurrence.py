"""Linear attention (gated delta networks, as in Qwen3.5) in packed rows: a prompt's state starts its continuations."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from rl_vlm.models.attention import SegmentLayout


class PromptState:
    """Stands in for transformers' cache of one layer, which keeps no gradients."""

    record_past = False

    def __init__(self, kernel: int) -> None:
        self.layers: Any = self
        self.recurrent_states: list[Tensor] = []  # at most one, [rows, heads, key size, value size]
        self._before = kernel - 1  # inputs that the convolution needs before a token
        self._inputs: Tensor | None = None  # the last ones of the prompt, [rows, channels, kernel - 1]

    def __getitem__(self, layer: int) -> PromptState:
        return self

    def has_previous_state(self, *_: int, **__: int) -> bool:
        return bool(self.recurrent_states)

    def update_conv_state(self, inputs: Tensor, *_: int, **__: int) -> Tensor:
        """The inputs [rows, channels, T] of the convolution, after the prompt's."""
        if self._inputs is not None:
            return torch.cat([self._inputs.expand(len(inputs), -1, -1), inputs], dim=-1)
        self._inputs = functional.pad(inputs, (self._before, 0))[..., -self._before :]
        return inputs

    def update_recurrent_state(self, state: Tensor, *_: int, **__: int) -> None:
        self.recurrent_states = [state]

    def repeat(self, rows: int) -> None:
        """For as many continuations."""
        self.recurrent_states = [state.expand(rows, -1, -1, -1) for state in self.recurrent_states]


def attend_segments(layer: Any, hidden_states: Tensor, segments: SegmentLayout | None = None, **kwargs: Any) -> Tensor:
    """The forward pass of transformers' layer, [B, L, D] of hidden states [B, L, D]. With `segments` each continuation
    sees its prompt and itself. Outputs of padding are unspecified, and finite."""
    forward = partial(type(layer).forward, layer)
    if segments is None or not segments.later:
        return forward(hidden_states, **kwargs)
    rows = []
    for number, row in enumerate(hidden_states[:, None]):  # [1, L, D]
        pieces, later = [], segments.later.get(number)
        if later is None:
            rows.append(forward(row, **kwargs))
            continue
        prompt, state = later[0].prompt, PromptState(layer.conv1d.kernel_size[0])
        spans = [(prompt, later[0].start), *((one.start, one.stop) for one in later)]
        if prompt:
            pieces.append(forward(row[:, :prompt], **kwargs | {"cache_params": state})[0])
            state.repeat(len(spans))
        # Two tokens at least: of a single one a layer would write its state in place.
        own = pad_sequence(
            [functional.pad(row[0, start:stop], (0, 0, 0, stop == start + 1)) for start, stop in spans], True
        )
        mixed = forward(own, **kwargs | {"cache_params": state})
        pieces += [piece[: stop - start] for piece, (start, stop) in zip(mixed, spans, strict=True)]
        joined = torch.cat(pieces)
        rows.append(functional.pad(joined, (0, 0, 0, row.shape[1] - len(joined)))[None])
    return torch.cat(rows)


def share_states(layers: Iterable[Any]) -> None:
    """From now on they know segments."""
    for layer in layers:
        layer.forward = partial(attend_segments, layer)
