"""Training examples of a reward model in memory: the inputs of labelled segments, and what they should be worth."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from rl_vlm.config import RewardModelSection
from rl_vlm.labelling.session import is_answer
from rl_vlm.labelling.types import Label, Score, Segment, SegmentPair
from rl_vlm.preference.replay.frames import pack, unpack
from rl_vlm.preference.reward_model.ensemble import RewardEnsemble

_UNPACKED_BYTES = 2**30  # pictures that are kept unpacked while a model is trained


def target_of_label(label: Label, settings: RewardModelSection) -> tuple[float, float] | None:
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


class Examples:
    """Examples of `parts` segments each (2 for pairs, 1 for scores) with targets float32 [N, parts].

    With more than `capacity` examples the oldest are dropped. All segments have one shape. Pictures are packed as their
    difference to the first one that was added.
    """

    def __init__(self, parts: int, capacity: int) -> None:
        self.parts = parts
        self._capacity = capacity
        self.clear()

    def clear(self) -> None:
        """Drop all examples."""
        self._inputs: deque[tuple[np.ndarray | bytes, ...]] = deque(maxlen=self._capacity)
        self._targets: deque[tuple[float, ...]] = deque(maxlen=self._capacity)
        self._shape: tuple[int, ...] = ()  # of one segment's inputs
        self._segment_bytes = 0  # unpacked
        self._key: np.ndarray | None = None  # uint8 [H, W, 3]
        self._unpacked: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self._inputs)

    @property
    def nbytes(self) -> int:
        """Memory of the inputs."""
        return sum(len(part) if isinstance(part, bytes) else part.nbytes for row in self._inputs for part in row)

    @property
    def targets(self) -> np.ndarray:
        """float32 [N, parts]."""
        return np.array(list(self._targets), dtype=np.float32).reshape(-1, self.parts)

    def add(self, segments: Sequence[np.ndarray], target: tuple[float, ...]) -> None:
        """Keep one example: per segment the inputs uint8 [T, H, W, 3] or float32 [T, D]."""
        self._shape, self._segment_bytes = segments[0].shape, segments[0].nbytes
        if self._key is None and segments[0].dtype == np.uint8:
            self._key = segments[0][0].copy()
        self._inputs.append(tuple(segment if self._key is None else pack(segment, self._key) for segment in segments))
        self._targets.append(target)
        self._unpacked = None

    def batch(self, places: np.ndarray) -> np.ndarray:
        """[len(places), parts, T, ...]: the inputs at these places."""
        if len(self) * self.parts * self._segment_bytes > _UNPACKED_BYTES:
            return np.stack([self._read(place) for place in places])
        if self._unpacked is None:
            self._unpacked = np.stack([self._read(place) for place in range(len(self))])
        return self._unpacked[places]

    def forget_unpacked(self) -> None:
        """Free what `batch` has unpacked."""
        self._unpacked = None

    def _read(self, place: int) -> np.ndarray:
        parts = self._inputs[place]
        return np.stack(
            [unpack(part, self._key, self._shape) if isinstance(part, bytes) else part for part in parts]  # type: ignore[arg-type]
        )


def add_pairs(examples: Examples, model: RewardEnsemble, pairs: Sequence[SegmentPair], labels: Sequence[Label]) -> int:
    """Add the pairs that may be trained on; returns how many. Raises UserInputError for segments that the model cannot see."""
    usable = 0
    for pair, label in zip(pairs, labels, strict=True):
        target = target_of_label(label, model.settings)
        if target is not None:
            examples.add([model.inputs_of(pair.first), model.inputs_of(pair.second)], target)
            usable += 1
    return usable


def add_scores(examples: Examples, model: RewardEnsemble, segments: Sequence[Segment], scores: Sequence[Score]) -> int:
    """Add the segments that have a score s, with the target 2 s - 1, the range of a squashed reward; returns how many."""
    usable = 0
    for segment, score in zip(segments, scores, strict=True):
        if score.value is not None and not score.error:
            examples.add([model.inputs_of(segment)], (2 * score.value - 1,))
            usable += 1
    return usable
