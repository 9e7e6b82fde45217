"""Key-value memory of the running rows of the transformers engine."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_vlm.models.grouped_heads import last_token_attention
from rl_vlm.models.memory.parts import KV_BLOCK, KV_ROWS_PER_USED

_ALIGN = 8  # the attended window is a multiple of this, as CUDA's attention kernels require


def reserved_tokens(rows: int, length: int) -> int:
    """The most tokens that a cache has memory for once `rows` samples of up to `length` tokens run in it."""
    return KV_ROWS_PER_USED * rows * whole_blocks(length)


def whole_blocks(length: int) -> int:
    """`length` rounded up to whole blocks, so that the tensors are rarely reallocated."""
    return -(-length // KV_BLOCK) * KV_BLOCK


class RowCache:
    """One row of keys and values per running sample, each with its own length.

    Tensors are [rows, heads, capacity, head_dim]; rows [0, num_rows) are in use and stay packed: a finished row's place
    is taken by the last one. What is taken at a time is at most KV_ROWS_PER_USED rows for each that is in use, of the longest
    length since there was no row; an empty cache takes what its first rows need, and holds nothing once it is empty again.
    """

    def __init__(self) -> None:
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self.num_rows = 0
        self._write_at = torch.empty(0, dtype=torch.long)
        self._bias: Tensor | None = None
        self._window = 0

    @property
    def length(self) -> int:
        """Tokens that each row has memory for; 0 while the cache is empty."""
        return self._keys[0].shape[2] if self._keys else 0

    def admit(self, layers: list[tuple[Tensor, Tensor]], source: Tensor, max_length: int) -> None:
        """Copy prefilled keys and values into new rows.

        layers: per layer keys and values [P, heads, L, head_dim]; source int64 [R]: the prefilled row of each new row;
        max_length: the longest that any of the new rows can become.
        """
        first, length = self.num_rows, layers[0][0].shape[2]
        self._reserve(layers, first + len(source), max(max_length, length))
        for k, (keys, values) in enumerate(layers):
            self._keys[k][first : first + len(source), :, :length] = keys[source]
            self._values[k][first : first + len(source), :, :length] = values[source]
        self.num_rows = first + len(source)

    def replace(self, layers: list[tuple[Tensor, Tensor]], rows: Tensor) -> None:
        """Overwrite the keys and values of rows int64 [B]: per layer [B, heads, L, head_dim], padded where a row holds fewer."""
        length = layers[0][0].shape[2]
        for k, (keys, values) in enumerate(layers):
            self._keys[k][rows, :, :length] = keys
            self._values[k][rows, :, :length] = values

    def begin_step(self, lengths: Tensor, shortest: int, longest: int) -> None:
        """Announce a decode step: row r writes its new key and value at position lengths[r]; int64 [rows]."""
        heads, capacity = self._keys[0].shape[1:3]
        rows = torch.arange(self.num_rows * heads, device=lengths.device)
        self._write_at = rows * capacity + lengths.repeat_interleave(heads)  # in keys seen as [rows * heads * capacity]
        if shortest == longest:
            self._window, self._bias = longest + 1, None  # every row sees the whole window
            return
        self._window = min(-(-(longest + 1) // _ALIGN) * _ALIGN, capacity)
        seen = torch.arange(self._window, device=lengths.device)[None, :] <= lengths[:, None]
        bias = torch.zeros(seen.shape, dtype=self._keys[0].dtype, device=lengths.device)
        self._bias = bias.masked_fill_(~seen, float("-inf"))[:, None, None]

    def attend(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """Store one new key and value per row [rows, heads, head_dim] and attend with queries [rows, query heads,
        head_dim]; returns [rows, query heads * head_dim]."""
        rows, _, size = keys.shape
        for tensor, new in ((self._keys[layer], keys), (self._values[layer], values)):
            tensor.view(-1, size).index_copy_(0, self._write_at, new.reshape(-1, size))
        seen = slice(self._window)
        return last_token_attention(
            queries, self._keys[layer][:rows, :, seen], self._values[layer][:rows, :, seen], self._bias, scale
        )

    def keep(self, rows: Tensor) -> None:
        """Keep only these rows, in this order; int64 [K]. Only rows that change place are copied."""
        place = torch.arange(len(rows), device=rows.device)
        moved = rows != place
        if bool(moved.any()):
            source, target = rows[moved], place[moved]
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
        # Doubling the rows keeps the copying linear in the number of admissions. Where only the length grows, rows that a larger
        # batch left behind are given up: they would become longer, too.
        if rows > have_rows:
            new_rows = max(rows, KV_ROWS_PER_USED * have_rows)
        else:
            new_rows = min(have_rows, KV_ROWS_PER_USED * rows)
        new_length = max(length, have_length)
        for tensors in (self._keys, self._values):
            for k, tensor in enumerate(tensors):
                grown = tensor.new_zeros(new_rows, tensor.shape[1], new_length, tensor.shape[3])
                grown[: self.num_rows, :, :have_length] = tensor[: self.num_rows]
                tensors[k] = grown
