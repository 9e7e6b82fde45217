"""Labels: what control agent, labeller and reward model exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
from PIL import Image

from rl_vlm.types import EncodedImage, UserInputError

# 0: the first of a pair is better, 1: the second, -1: equal or undecided.
LabelValue = Literal[0, 1, -1]
# What a reward model sees: frames uint8 [N, H, W, 3], or observations and actions float32 [N, O + A].
InputKind = Literal["image", "state_action"]
SKIPPED = "skipped"  # the `error` of a pair that a scripted teacher skipped
IDENTICAL = "the pictures are identical"  # the `text` of a label that needed no question


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity: arrays have no one truth value
class Segment:
    """T consecutive steps of one episode."""

    observations: np.ndarray  # float32 [T, O]
    actions: np.ndarray  # float32 [T, A]
    true_rewards: np.ndarray  # float32 [T], for scripted teachers, logs and evaluation only
    frames: np.ndarray | None = None  # uint8 [T, H, W, 3], where they are drawn

    def __len__(self) -> int:
        return len(self.actions)


@dataclass(frozen=True, slots=True, eq=False)
class SegmentPair:
    """Two segments of equal length, to be compared."""

    first: Segment
    second: Segment


@dataclass(frozen=True, slots=True)
class Label:
    """A labeller's answer for one pair. One with an error is no answer and is never trained on."""

    value: LabelValue
    probabilities: tuple[float, ...] | None = None  # first better, second better, neither; where known
    text: str = ""
    seconds: float = 0.0
    error: str = ""  # SKIPPED: on purpose
    answers: tuple[LabelValue, ...] = ()  # of each order in which the pair was shown, in terms of the pair as it is

    @property
    def is_decided(self) -> bool:
        return not self.error and self.value != -1

    def swapped(self) -> Label:
        other = cast("dict[LabelValue, LabelValue]", {0: 1, 1: 0, -1: -1})
        known = self.probabilities
        return replace(
            self,
            value=other[self.value],
            probabilities=(known[1], known[0], known[2]) if known else None,
            answers=tuple(other[answer] for answer in self.answers),
        )


@dataclass(frozen=True, slots=True)
class Score:
    """A labeller's score in [0, 1] for one picture; None where it was unsure, or where `error` is set."""

    value: float | None
    text: str = ""
    seconds: float = 0.0
    error: str = ""

    @property
    def is_decided(self) -> bool:
        return not self.error and self.value is not None

    def swapped(self) -> Score:
        """The score of the opposite goal."""
        return self if self.value is None else replace(self, value=1 - self.value)


class Labeller:
    """Compares segments, and may score single pictures. A random state is part of `state`, for an exact resume."""

    stats: Any = None  # what labelling has cost, where that is counted

    async def label(self, pairs: Sequence[SegmentPair]) -> list[Label]:
        """One label per pair, in order; all pairs are in flight at once."""
        raise NotImplementedError  # abstract: a labeller answers pairs, scores, or both

    async def score(self, frames: Sequence[np.ndarray]) -> list[Score]:
        """One score per frame (uint8 [H, W, 3]), in order; all frames are in flight at once."""
        raise NotImplementedError  # abstract: see `label`

    def set_margin(self, mean_return: float, segment_length: int, horizon: int) -> None:
        """The recent mean return of episodes, and how long segments and episodes are; thresholds may follow them."""

    def state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""


def picture_of(segment: Segment, frames: int = 1) -> np.ndarray:
    """uint8 [H, frames × W, 3]: pictures of the segment side by side, evenly spaced, its last one last. Raises
    UserInputError if it has none."""
    if segment.frames is None:
        raise UserInputError("These segments have no pictures: give the environment a camera or a render function.")
    steps = len(segment)
    indices = [max(steps - 1 - back * (steps // frames), 0) for back in reversed(range(frames))]
    return np.concatenate([segment.frames[index] for index in indices], axis=1)


def encode(picture: np.ndarray) -> EncodedImage:
    """The PNG of a picture uint8 [H, W, 3] and its hash, for a labeller and for the label store."""
    return EncodedImage.from_pil(Image.fromarray(picture))


def true_return(segment: Segment) -> float:
    """The undiscounted sum of the true rewards."""
    return float(np.sum(segment.true_rewards, dtype=np.float64))


def agreement(returns: Sequence[tuple[float, float]], labels: Sequence[Label]) -> list[bool | None]:
    """Whether each label prefers the higher return, of the pairs whose returns are known and differ and whose label is
    no error; None: it is undecided."""
    return [
        (label.value == 1) == (second > first) if label.is_decided else None
        for (first, second), label in zip(returns, labels, strict=True)
        if np.isfinite(second - first) and first != second and not label.error
    ]
