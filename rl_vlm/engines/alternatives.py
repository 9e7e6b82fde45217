"""The most likely tokens of each place of a sample, in three arrays: as tuples of tuples a long reply's take a gigabyte to pickle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

TopLogprobs = tuple[tuple[int, float], ...]  # (token id, log-probability), best first


class Alternatives(Sequence[TopLogprobs]):
    """A sequence of `TopLogprobs`, one for each place; see `packed`.

    Args:
        ends: int64 [T], where each place's end in the other two.
        token_ids: int32 [N].
        logprobs: float64 [N], so that no number changes.
    """

    __slots__ = ("_ends", "_logprobs", "_token_ids")

    def __init__(self, ends: np.ndarray, token_ids: np.ndarray, logprobs: np.ndarray) -> None:
        self._ends, self._token_ids, self._logprobs = ends, token_ids, logprobs

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, place: int) -> TopLogprobs: ...

    @overload
    def __getitem__(self, place: slice) -> Alternatives: ...

    def __getitem__(self, place: int | slice) -> TopLogprobs | Alternatives:
        if isinstance(place, slice):
            return _pack([self[k] for k in range(*place.indices(len(self)))])
        k = range(len(self))[place]
        piece = slice(int(self._ends[k - 1]) if k else 0, int(self._ends[k]))
        return tuple(zip(self._token_ids[piece].tolist(), self._logprobs[piece].tolist(), strict=True))

    def __iter__(self) -> Iterator[TopLogprobs]:
        return (self[k] for k in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(tuple.__eq__, self, other))

    __hash__ = None  # type: ignore[assignment]  # as arrays have none

    def __repr__(self) -> str:
        return f"Alternatives({list(self)})"


def packed(places: Sequence[TopLogprobs]) -> Sequence[TopLogprobs]:
    """The same in little memory, quick to pickle; () for nothing."""
    return places if isinstance(places, Alternatives) else _pack(places) if places else ()


def _pack(places: Sequence[TopLogprobs]) -> Alternatives:
    return Alternatives(
        np.cumsum([len(place) for place in places], dtype=np.int64),
        np.array([token for place in places for token, _ in place], dtype=np.int32),
        np.array([logprob for place in places for _, logprob in place], dtype=np.float64),
    )
