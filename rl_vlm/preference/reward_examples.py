"""The training examples of a reward model, in memory: the inputs of labelled segments, and their targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from rl_vlm.preference.frame_ring import pack, unpack

_UNPACKED_BYTES = 2**30  # pictures that are kept unpacked while a model is trained


class Examples:
    """Examples of `parts` equal segments (2 for pairs, 1 for scores) with a target per segment. Pictures are packed as
    their difference to the first one that was added."""

    def __init__(self, parts: int) -> None:
        self.parts = parts
        self.targets: list[tuple[float, ...]] = []
        self._inputs: list[tuple[Any, ...]] = []  # arrays, or packed pictures
        self._key: np.ndarray | None = None  # uint8 [H, W, 3]
        self._shape: tuple[int, ...] = ()  # of one segment's inputs

    def __len__(self) -> int:
        return len(self._inputs)

    def add(self, segments: Sequence[np.ndarray], target: tuple[float, ...]) -> None:
        """Keep one example: the inputs of each segment, uint8 [T, H, W, 3] or float32 [T, D]."""
        if not self._inputs and segments[0].dtype == np.uint8:
            self._key = segments[0][0].copy()
        self._shape = segments[0].shape
        self._inputs.append(tuple(segment if self._key is None else pack(segment, self._key) for segment in segments))
        self.targets.append(target)

    def reader(self) -> Callable[[np.ndarray], np.ndarray]:
        """Reads inputs [B, parts, T, ...] by the examples' numbers; few pictures stay unpacked with the reader."""
        if self._key is not None and len(self) * self.parts * math.prod(self._shape) > _UNPACKED_BYTES:
            return self._read
        return self._read(range(len(self))).__getitem__

    def _read(self, numbers: Iterable[int]) -> np.ndarray:
        key = self._key
        rows = (self._inputs[number] for number in numbers)
        return np.array([row if key is None else [unpack(part, key, self._shape) for part in row] for row in rows])
