"""Training examples of a reward model: the inputs of labelled segments in memory, large pictures compressed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from rl_vlm.config import RewardModelSection
from rl_vlm.labelling.session import is_answer
from rl_vlm.labelling.types import Label, Score, Segment, SegmentPair
from rl_vlm.types import UserInputError

InputKind = Literal["image", "state_action"]
_COMPRESS_FROM = 32 * 1024  # bytes; smaller arrays would cost more time than they save memory
_CODEC = pa.Codec("zstd", compression_level=1)


def inputs_of(segment: Segment, kind: InputKind) -> np.ndarray:
    """A reward model's inputs of a segment: uint8 [T, H, W, 3] or float32 [T, O + A]."""
    if kind == "state_action":
        return np.concatenate([segment.observations, segment.actions], axis=1, dtype=np.float32)
    if segment.frames is None:
        raise UserInputError("An image reward model needs segments with pictures: give the environment a camera.")
    return segment.frames


def target_of(label: Label, settings: RewardModelSection) -> tuple[float, float] | None:
    """(weight of the first, weight of the second), summing to 1; None if the label is not trained on.

    Where the label's probabilities are used, no preference counts half for each side.
    """
    if not is_answer(label) or (label.value == -1 and settings.ties == "skip"):
        return None
    if settings.soft_labels and label.probabilities is not None:
        first, second, neither = label.probabilities
        return first + neither / 2, second + neither / 2
    if label.value == -1:
        return 0.5, 0.5
    high, low = 1 - settings.label_margin, settings.label_margin
    return (high, low) if label.value == 0 else (low, high)


class _Packed:
    """An array, compressed if it is large."""

    __slots__ = ("_data", "_dtype", "_shape")

    def __init__(self, array: np.ndarray) -> None:
        array = np.ascontiguousarray(array)
        self._shape, self._dtype = array.shape, array.dtype
        self._data: Any = array.copy() if array.nbytes < _COMPRESS_FROM else _CODEC.compress(array, asbytes=True)

    def unpack(self) -> np.ndarray:
        if isinstance(self._data, np.ndarray):
            return self._data
        size = int(np.prod(self._shape)) * self._dtype.itemsize
        return np.frombuffer(_CODEC.decompress(self._data, size), self._dtype).reshape(self._shape)

    @property
    def nbytes(self) -> int:
        return len(self._data) if isinstance(self._data, bytes) else int(self._data.nbytes)


class Examples:
    """Examples of `parts` segments each (2 for pairs, 1 for scores) with targets float32 [N, parts].

    With more than `capacity` examples the oldest are dropped.
    """

    def __init__(self, kind: InputKind, parts: int, capacity: int) -> None:
        self.kind = kind
        self.parts = parts
        self._inputs: deque[tuple[_Packed, ...]] = deque(maxlen=capacity)
        self._targets: deque[tuple[float, ...]] = deque(maxlen=capacity)
        self._added = 0

    def __len__(self) -> int:
        return len(self._inputs)

    @property
    def nbytes(self) -> int:
        """Memory of the inputs."""
        return sum(part.nbytes for example in self._inputs for part in example)

    @property
    def targets(self) -> np.ndarray:
        """float32 [N, parts]."""
        return np.array(list(self._targets), dtype=np.float32).reshape(-1, self.parts)

    def add_pairs(self, pairs: Sequence[SegmentPair], labels: Sequence[Label], settings: RewardModelSection) -> int:
        """Keep the pairs that may be trained on; returns how many."""
        before = self._added
        for pair, label in zip(pairs, labels, strict=True):
            target = target_of(label, settings)
            if target is not None:
                self._add((pair.first, pair.second), target)
        return self._added - before

    def add_scores(self, segments: Sequence[Segment], scores: Sequence[Score]) -> int:
        """Keep the segments whose last picture has a score s, with the target 2 s - 1; returns how many."""
        before = self._added
        for segment, score in zip(segments, scores, strict=True):
            if score.value is not None and not score.error:
                self._add((segment,), (2 * score.value - 1,))
        return self._added - before

    def batch(self, places: np.ndarray) -> np.ndarray:
        """[len(places), parts, T, ...]: the inputs at these places."""
        return np.stack([np.stack([part.unpack() for part in self._inputs[place]]) for place in places])

    def _add(self, segments: Sequence[Segment], target: tuple[float, ...]) -> None:
        self._inputs.append(tuple(_Packed(inputs_of(segment, self.kind)) for segment in segments))
        self._targets.append(target)
        self._added += 1
