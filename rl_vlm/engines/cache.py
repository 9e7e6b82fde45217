"""Keys and values of the running samples of the transformers engine, one row each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_vlm.models.attention import last_token_attention

if TYPE_CHECKING:
    pass


# Keys and values of the running rows: lengths are whole blocks, with memory for at most so many rows for each in use.

KV_BLOCK, KV_ROWS_PER_USED = 64, 2
_ALIGN = 8  # the attended window is a multiple of this, as CUDA's attention kernels require


def reserved_tokens(rows: int, length: int) -> int:
    """The most tokens that a cache has memory for while `rows` samples of up to `length` tokens run in it."""
    return KV_ROWS_PER_USED * rows * whole_blocks(length)


def whole_blocks(length: int) -> int:
    """`length` rounded up to whole blocks, so that the tensors are rarely reallocated."""
    return -(-length // KV_BLOCK) * KV_BLOCK


class RowCache:
    """One row of keys and values per running sample, each with its own length.

    Tensors are [rows, heads, capacity, head_dim]; rows [0, num_rows) are in use. There is memory for at most
    KV_ROWS_PER_USED rows for each of these, of the longest length since the cache was empty.
    """

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self.num_rows = 0
        self._lengths = torch.empty(0, dtype=torch.long)
        self._write_at: dict[tuple[int, int], Tensor] = {}  # by heads and capacity of a layer's tensors
        self._bias: Tensor | None = None
        self._window = 0

    @property
    def length(self) -> int:
        """Tokens that each row has memory for."""
        return self._keys[0].shape[2] if self._keys else 0

    def admit(self, layers: list[tuple[Tensor, Tensor]], source: Tensor, max_length: int) -> None:
        """Copy prefilled keys and values, per layer [P, heads, L, head_dim], into new rows, which can become
        `max_length` long; source int64 [R] is the prefilled row of each."""
        new, length = slice(self.num_rows, self.num_rows + len(source)), layers[0][0].shape[2]
        self._reserve(layers, new.stop, max(max_length, length))
        for k, (keys, values) in enumerate(layers):
            self._keys[k][new, :, :length] = keys[source]
            self._values[k][new, :, :length] = values[source]
        self.num_rows = new.stop

    def replace(self, layers: list[tuple[Tensor, Tensor]], rows: Tensor) -> None:
        """Overwrite rows int64 [B] with per layer [B, heads, L, head_dim], padded where a row holds fewer."""
        length = layers[0][0].shape[2]
        for k, (keys, values) in enumerate(layers):
            self._keys[k][rows, :, :length] = keys
            self._values[k][rows, :, :length] = values

    def begin_step(self, lengths: Tensor, shortest: int, longest: int) -> None:
        """Prepare a decode step, in which row r writes its new key and value at position lengths[r]; int64 [rows]."""
        capacity = self._keys[0].shape[2]
        self._lengths, self._write_at = lengths, {}
        if shortest == longest:
            self._window, self._bias = longest + 1, None  # every row sees the whole window
            return
        self._window = min(-(-(longest + 1) // _ALIGN) * _ALIGN, capacity)
        seen = torch.arange(self._window, device=lengths.device)[None, :] <= lengths[:, None]
        bias = torch.zeros(seen.shape, dtype=self._keys[0].dtype, device=lengths.device)
        self._bias = bias.masked_fill_(~seen, float("-inf"))[:, None, None]

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Store a key and value per row [rows, heads, head_dim] and attend with queries [rows, query heads, head_dim];
        returns [rows, query heads * head_dim]."""
        keys, values = self.store(layer, keys, values)
        return last_token_attention(queries, keys, values, self._bias, scale)

    def store(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store a key and value per row [rows, heads, head_dim]; returns all seen [rows, heads, window, head_dim]."""
        mine, theirs = self._keys[layer], self._values[layer]
        heads, capacity = mine.shape[1:3]
        if (places := self._write_at.get((heads, capacity))) is None:  # in the tensor as [rows * heads * capacity]
            rows = torch.arange(len(keys) * heads, device=keys.device)
            places = self._write_at[heads, capacity] = rows * capacity + self._lengths.repeat_interleave(heads)
        for tensor, new in ((mine, keys), (theirs, values)):
            size = new.shape[-1]
            tensor.view(-1, size).index_copy_(0, places, new.reshape(-1, size))
        count, seen = len(keys), slice(self._window)
        return mine[:count, :, seen], theirs[:count, :, seen]

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows, in this order; int64 [K]. Only rows that change place are copied."""
        index = torch.arange(len(rows), device=rows.device)
        moved = rows != index
        if bool(moved.any()):
            source, target = rows[moved], index[moved]
            for tensors in (self._keys, self._values):
                for tensor in tensors:
                    tensor[target] = tensor[source]
        self.num_rows = len(rows)
        if not len(rows):
            self._keys, self._values = [], []

    def _reserve(self, layers: list[tuple[Tensor, Tensor]], rows: int, length: int) -> None:
        length = whole_blocks(length)
        if not self._keys:
            for keys, values in layers:
                self._keys.append(keys.new_zeros(rows, keys.shape[1], length, keys.shape[3]))
                self._values.append(values.new_zeros(rows, values.shape[1], length, values.shape[3]))
            return
        have_rows, have_length = self._keys[0].shape[0], self._keys[0].shape[2]
        if rows <= have_rows and length <= have_length:
            return
        if rows > have_rows:  # doubled, so that the copying is linear in the number of admissions
            new_rows = max(rows, KV_ROWS_PER_USED * have_rows)
        else:  # spare rows of a larger batch would become longer, too: they are given up
            new_rows = min(have_rows, KV_ROWS_PER_USED * rows)
        new_length = max(length, have_length)
        for tensors in (self._keys, self._values):
            for k, tensor in enumerate(tensors):
                grown = tensor.new_zeros(new_rows, tensor.shape[1], new_length, tensor.shape[3])
                grown[: self.num_rows, :, :have_length] = tensor[: self.num_rows]
                tensors[k] = grown
