"""What flows between the control agent, the labeller and the reward models. Nothing here knows Ray or torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, cast

import numpy as np
from PIL import Image

from rl_vlm.types import EncodedImage, UserInputError

# 0: the first of a pair is better, 1: the second, -1: equal or undecided.
LabelValue = Literal[0, 1, -1]
# What a reward model sees: frames uint8 [N, H, W, 3], or observations and actions float32 [N, O + A].
InputKind = Literal["image", "state_action"]


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity: arrays have no one truth value
class Segment:
    """T consecutive steps of one episode.

    observations float32 [T, O], actions float32 [T, A], true_rewards float32 [T] (for scripted teachers, logs and
    evaluation only), frames uint8 [T, H, W, 3] or None where nothing is drawn.
    """

    observations: np.ndarray
    actions: np.ndarray
    true_rewards: np.ndarray
    frames: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.actions)


@dataclass(frozen=True, slots=True, eq=False)
class SegmentPair:
    """Two segments of equal length, to be compared."""

    first: Segment
    second: Segment


@dataclass(frozen=True, slots=True)
class Label:
    """A labeller's answer for one pair.

    `probabilities` are those of (first better, second better, neither) where the labeller knows them. `answers` are
    those of each order in which the pair was shown, in terms of the pair as it is. A label with `error` set is not an
    answer and is never trained on; the error `SKIPPED` means that the labeller skipped the pair on purpose.
    """

    value: LabelValue
    probabilities: tuple[float, float, float] | None = None
    text: str = ""
    seconds: float = 0.0
    error: str = ""
    answers: tuple[LabelValue, ...] = ()

    def swapped(self) -> Label:
        """The label of the same pair in the other order."""
        other = cast("dict[LabelValue, LabelValue]", {0: 1, 1: 0, -1: -1})
        known = self.probabilities
        return replace(
            self,
            value=other[self.value],
            probabilities=(known[1], known[0], known[2]) if known else None,
            answers=tuple(other[answer] for answer in self.answers),
        )


SKIPPED = "skipped"  # the `error` of a pair that a scripted teacher skipped
IDENTICAL = "the pictures are identical"  # the `text` of a label that needed no question


@dataclass(frozen=True, slots=True)
class Score:
    """A labeller's score in [0, 1] for one picture; None where it was unsure, or where `error` is set."""

    value: float | None
    text: str = ""
    seconds: float = 0.0
    error: str = ""


class Labeller:
    """Compares segments, and may score single pictures. One with a random state says so in `state`, for an exact
    resume."""

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
        """As JSON."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""


class RewardModel(Protocol):
    """A learned reward of inputs of one kind."""

    @property
    def input_kind(self) -> InputKind:
        """What its inputs are."""
        ...

    def rewards(self, inputs: np.ndarray) -> np.ndarray:
        """float32 [N], the mean of the ensemble."""
        ...


# The pictures of segments: as a labeller sees them, and as PNG.


def picture_of(segment: Segment, frames: int = 1) -> np.ndarray:
    """uint8 [H, frames × W, 3]: `frames` pictures of the segment side by side, evenly spaced, the last of them its
    last.

    Raises UserInputError if the segment has no pictures.
    """
    if segment.frames is None:
        raise UserInputError("These segments have no pictures: give the environment a camera or a render function.")
    steps = len(segment)
    indices = [max(steps - 1 - back * (steps // frames), 0) for back in reversed(range(frames))]
    return np.concatenate([segment.frames[index] for index in indices], axis=1)


def encode(picture: np.ndarray) -> EncodedImage:
    """The PNG of a picture uint8 [H, W, 3] and its hash, for a labeller and for the label store."""
    return EncodedImage.from_pil(Image.fromarray(picture))
