"""Packs trajectories into the micro-batches of one optimiser step.

A packed row holds the prompt of a group once, followed by the group's continuations, each of which attends to the
prompt and itself only. The result equals one row per sample, at a fraction of the work when prompts (images!) are
long and answers are short. The segments of an episode are packed as if each were a trajectory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rl_vlm.batches import in_batches
from rl_vlm.learning.experience import Arrays, turn_lengths
from rl_vlm.models.images import ImageLayout
from rl_vlm.types import EncodedImage, StopReason, TeacherScores, Trajectory, TrajectoryStatus, Turn

if TYPE_CHECKING:
    from torch import Tensor  # the driver packs nothing and need not import torch

    from rl_vlm.config import OptimizerSection
    from rl_vlm.learning.policy_model import PolicyModel
    from rl_vlm.models.images import TextSide

# A packed row under a dense mask computes attention over its whole length, squared: at most this many times that of
# separate rows.
_MAX_ATTENTION = 2.0
# By segments only what is seen is computed. One token costs as much as so many query-key pairs per unit of the model's
# width: a layer takes about 24 D² for a token and 4 D for a pair, which is three times as slow for its arithmetic.
_PAIRS_PER_WIDTH = 2
_PREFIX, _PADDING = 0, -1


@dataclass(slots=True)
class Minibatch:
    """One learner's part of one optimiser step: groups, and the weight of each token's loss by trajectory id."""

    groups: list[list[Trajectory]]
    weights: dict[str, float]


class SegmentId(NamedTuple):
    """A segment of a trajectory; `start` is its first sampled token among those of the trajectory."""

    trajectory_id: str
    start: int


@dataclass(slots=True)
class MicroBatch:
    """Padded arrays of one forward pass (B rows of L tokens, N sampled tokens), and what is known of these tokens
    before the step: float32 [N], None where it is not needed or not known yet. A segment is never split."""

    input_ids: np.ndarray
    position_ids: np.ndarray
    segments: np.ndarray  # int16 [B, L]: 0 prompt, 1.. the continuations, -1 padding
    images: list[EncodedImage]
    row: np.ndarray  # with `column` int64 [N]: where the hidden state is that predicts `target`
    column: np.ndarray
    target: np.ndarray  # int64 [N]
    behaviour: np.ndarray  # float32 [N]: the engine's log-probabilities
    sample: np.ndarray  # int64 [N]: the segment, by its place in `parts`
    turn: np.ndarray  # int64 [N]: the turn of the segment
    parts: list[SegmentId] = field(default_factory=list)
    next_images: list[EncodedImage] = field(default_factory=list)  # of the following micro-batch, to be read ahead
    counts: bool = True  # False for a pass that is made only because the other learners make one
    weight: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    advantage: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    returns: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.float32))  # NaN: the critic learns nothing
    value_weight: float = 0.0  # of each token that has a return
    old: Tensor | None = None  # log-probabilities of the policy before the first step
    reference: Tensor | None = None  # and of the base model
    values: Tensor | None = None  # and the critic's values
    entropies: Tensor | None = None  # of the policy in the first epoch
    allowed: tuple[np.ndarray, np.ndarray] | None = None  # by rollout.format, see `allowed_tokens`
    teacher: TeacherScores | None = None  # where its most likely tokens count
    probe: Tensor | None = None  # log-probabilities of a separate pass, which the first ratios are compared with

    @property
    def turns(self) -> list[np.ndarray]:
        """The sampled tokens of each turn."""
        begins = (np.diff(self.sample) != 0) | (np.diff(self.turn) != 0)
        return np.split(self.target, np.flatnonzero(begins) + 1)

    @property
    def sizes(self) -> list[int]:
        """The number of sampled tokens of each part."""
        return np.bincount(self.sample, minlength=len(self.parts)).tolist()  # type: ignore[no-any-return]

    def join(self, tokens: Mapping[str, np.ndarray]) -> np.ndarray:
        """The arrays of trajectories, by id, as one [N]; other trajectories may be among them."""
        parts = zip(self.parts, self.sizes, strict=True)
        return np.concatenate([tokens[name][start : start + size] for (name, start), size in parts])

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Give each token the weight of its trajectory."""
        self.weight = np.array([weights[name] for name, _ in self.parts], dtype=np.float32)[self.sample]


def gathered(found: Iterable[tuple[MicroBatch, np.ndarray]]) -> Arrays:
    """Arrays [N] of micro-batches as those of the trajectories, by id: the inverse of `MicroBatch.join`."""
    pieces = {
        part: piece
        for micro, tokens in found
        for part, piece in zip(micro.parts, np.split(tokens, np.cumsum(micro.sizes)[:-1]), strict=True)
    }
    arrays = defaultdict[str, list[np.ndarray]](list)
    for part in sorted(pieces):
        arrays[part.trajectory_id].append(pieces[part])
    return {name: np.concatenate(own) for name, own in arrays.items()}


class BatchBuilder:
    """Packs minibatches for the model of `text`.

    Args:
        max_tokens: padded tokens per micro-batch; a longer row goes alone.
        share_prompts: pack the samples of a group into one row where that is cheaper.
        width: of the language model, where attention is computed by segments; 0: under a dense mask.
    """

    def __init__(self, text: TextSide, max_tokens: int, share_prompts: bool = True, width: int = 0) -> None:
        self._pad_token_id, self._images, self._max_tokens = text.codec.pad_token_id, text.images, max_tokens
        self._share_prompts, self._width = share_prompts, width

    def build(self, groups: Sequence[Sequence[Trajectory]]) -> list[MicroBatch]:
        """Micro-batches in order of row length, without weights and advantages."""
        rows = [self._row(row) for group in groups for alike in self._by_prompt(group) for row in self._split(alike)]
        rows.sort(key=lambda row: row.input_ids.shape[1])

        def fits(batch: list[MicroBatch], longer: MicroBatch) -> bool:
            return (len(batch) + 1) * longer.input_ids.shape[1] <= self._max_tokens

        return [self._stack(batch) for batch in in_batches(rows, fits)]

    def _by_prompt(self, group: Sequence[Trajectory]) -> list[list[Trajectory]]:
        """The segments of the group's trajectories, those with the same prompt, images included, together."""
        alike = defaultdict[Any, list[Trajectory]](list)
        for part in (part for trajectory in group for part in trajectory.parts):
            prompt = part.token_ids[: _prompt_length(part)].tobytes()
            shown = tuple(image.sha256 for image in part.images[: self._prompt_images(part)])
            alike[(prompt, shown) if self._share_prompts else len(alike)].append(part)
        return list(alike.values())

    def _split(self, group: Sequence[Trajectory]) -> list[Sequence[Trajectory]]:
        """Segments of one prompt as the fewest rows that are not too long, or a row for each where packing is no
        cheaper."""
        prefix = _prompt_length(group[0])
        for count in range(1, len(group)):
            rows = _spread(group, prefix, count)
            if all(len(row) == 1 or _packed_length(row, prefix) <= self._max_tokens for row in rows):
                if all(self._is_cheaper(row, prefix) for row in rows):
                    return rows
                break
        return [[trajectory] for trajectory in group]

    def _is_cheaper(self, row: Sequence[Trajectory], prefix: int) -> bool:
        """Whether a row of trajectories that share the `prefix` costs less than a row for each."""
        lengths, packed = list(map(len, row)), _packed_length(row, prefix)
        squares = sum(length**2 for length in lengths)
        if packed**2 <= _MAX_ATTENTION * squares:
            return True
        pairs = prefix**2 // 2 + sum((length - prefix) * length for length in lengths)
        saved = sum(lengths) - packed
        return saved * _PAIRS_PER_WIDTH * self._width > pairs - squares // 2

    def _row(self, group: Sequence[Trajectory]) -> MicroBatch:
        """One row: the prompt once, then the continuations."""
        prefix = _prompt_length(group[0])
        ids, positions, columns = [], [], []
        segments = [np.full(prefix, _PREFIX, dtype=np.int16)]
        images: list[EncodedImage] = []
        end = 0
        for number, trajectory in enumerate(group):
            start = prefix if number else 0  # of what this trajectory adds to the row
            rows = self._images.positions(trajectory.token_ids, trajectory.images)
            ids.append(trajectory.token_ids[start:])
            positions.append(rows[:, start:])
            segments.append(np.full(len(trajectory) - prefix, number + 1, dtype=np.int16))
            images.extend(trajectory.images[self._prompt_images(trajectory) if number else 0 :])
            # Token t is predicted by the hidden state before it; the first of a continuation by the prompt's last.
            sampled = np.flatnonzero(trajectory.loss_mask)
            columns.append(np.where(sampled == prefix, prefix - 1, sampled - 1 + end - start))
            end += len(trajectory) - start
        return MicroBatch(
            input_ids=np.concatenate(ids)[None],
            position_ids=np.concatenate(positions, axis=1)[:, None],
            segments=np.concatenate(segments)[None],
            images=images,
            row=np.zeros(sum(map(len, columns)), dtype=np.int64),
            column=np.concatenate(columns),
            target=np.concatenate([one.token_ids[one.loss_mask] for one in group]).astype(np.int64),
            behaviour=np.concatenate([one.logprobs[one.loss_mask] for one in group]),
            sample=np.repeat(np.arange(len(group)), list(map(len, columns))),
            turn=np.concatenate([np.repeat(np.arange(len(one.turns)), turn_lengths(one)) for one in group]),
            parts=[SegmentId(one.trajectory_id, one.sampled_before) for one in group],
            teacher=_joined([one.teacher for one in group]),
        )

    def _prompt_images(self, trajectory: Trajectory) -> int:
        """How many of the trajectory's images stand in its prompt."""
        prompt = trajectory.token_ids[: _prompt_length(trajectory)]
        return count_images(prompt, trajectory.images, self._images)

    def _stack(self, rows: Sequence[MicroBatch]) -> MicroBatch:
        """Rows as one micro-batch, padded to the longest."""
        longest = max(row.input_ids.shape[1] for row in rows)
        ids = np.full((len(rows), longest), self._pad_token_id, dtype=np.int64)
        positions = np.zeros((len(rows[0].position_ids), len(rows), longest), dtype=np.int64)
        segments = np.full((len(rows), longest), _PADDING, dtype=np.int16)
        for k, row in enumerate(rows):
            length = row.input_ids.shape[1]
            ids[k, :length], segments[k, :length] = row.input_ids[0], row.segments[0]
            positions[:, k, :length] = row.position_ids[:, 0]
        before = np.cumsum([0, *(len(row.parts) for row in rows)])  # parts in the rows above
        return MicroBatch(
            input_ids=ids,
            position_ids=positions,
            segments=segments,
            images=[image for row in rows for image in row.images],
            row=np.repeat(np.arange(len(rows)), [len(row.target) for row in rows]),
            column=np.concatenate([row.column for row in rows]),
            target=np.concatenate([row.target for row in rows]),
            behaviour=np.concatenate([row.behaviour for row in rows]),
            sample=np.concatenate([row.sample + above for row, above in zip(rows, before, strict=False)]),
            turn=np.concatenate([row.turn for row in rows]),
            parts=[part for row in rows for part in row.parts],
            teacher=_joined([row.teacher for row in rows]),
        )


def _joined(scores: Sequence[TeacherScores | None]) -> TeacherScores | None:
    """All of them, in order; None where the teacher's most likely tokens are not known."""
    known = [one for one in scores if one is not None and one.ids.shape[1]]
    return TeacherScores.joined(known) if known else None


def count_images(token_ids: np.ndarray, images: Sequence[EncodedImage], layout: ImageLayout) -> int:
    """How many of the images have all of their tokens in these ids."""
    ends = np.cumsum([layout.num_features(image.width, image.height) for image in images])
    return int(np.searchsorted(ends, int((token_ids == layout.image_token_id).sum()), side="right"))


def _packed_length(row: Sequence[Trajectory], prefix: int) -> int:
    return prefix + sum(len(trajectory) - prefix for trajectory in row)


def _spread(group: Sequence[Trajectory], prefix: int, count: int) -> list[Sequence[Trajectory]]:
    """The group as `count` rows of about the same length: the longest first, each to the row that is the shortest."""
    rows: list[list[int]] = [[] for _ in range(count)]
    for number in sorted(range(len(group)), key=lambda number: len(group[number]), reverse=True):
        min(rows, key=lambda row: _packed_length([group[one] for one in row], prefix)).append(number)
    return [[group[number] for number in sorted(row)] for row in rows]


def _prompt_length(trajectory: Trajectory) -> int:
    """Tokens before the first sampled one."""
    return int(np.argmax(trajectory.loss_mask))


def padding_batch(builder: BatchBuilder, token_id: int) -> MicroBatch:
    """One row of two tokens `token_id` that the policy may sample, the second sampled, with weight and advantage 0."""
    turns = (Turn(1, 2, 0, StopReason.END_OF_TURN),)
    ids, mask, logprobs = np.full(2, token_id, np.int32), np.array([False, True]), np.zeros(2, np.float32)
    (micro,) = builder.build([[Trajectory("", ids, mask, logprobs, turns, TrajectoryStatus.COMPLETED)]])
    nothing = np.zeros(1, np.float32)
    return replace(micro, counts=False, weight=nothing, advantage=nothing, returns=np.full(1, np.nan, np.float32))


def make_builder(policy: PolicyModel, learner: OptimizerSection) -> BatchBuilder:
    """What packs trajectories for a policy."""
    width = 0 if learner.attention == "dense" else policy.backbone.width
    share_prompts = learner.share_prompts and policy.backbone.packs
    return BatchBuilder(policy.text, learner.micro_batch_tokens, share_prompts, width)
