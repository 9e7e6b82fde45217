"""Packs trajectories into the micro-batches of one optimiser step.

The samples of a group share their prompt. A packed row holds that prompt once, followed by the group's continuations;
the attention mask lets each continuation see the prompt and itself only. The result equals one row per sample, at a
fraction of the work when prompts (images!) are long and answers are short.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rl_vlm.chat import mrope_positions
from rl_vlm.models.images import ImageProcessorSpec
from rl_vlm.types import EncodedImage, Trajectory

# Under a dense mask a packed row pays attention over its whole length: it is packed while that costs at most this much more than
# separate rows. Segments pay for what is seen, so tokens that are computed once instead of G times may be weighed against
# query-key pairs: per unit of the model's width one token costs as much as so many pairs. (A layer computes about 24 D² for a token
# and 4 D for a pair; a pair takes about three times as long for its arithmetic, as measured.)
_MAX_ATTENTION_OVERHEAD = 1.0
_PAIRS_PER_WIDTH = 2
_PREFIX, _PADDING = 0, -1


@dataclass(slots=True)
class TrainSample:
    """One trajectory with the advantages float32 [T] of its sampled tokens and the weight of each token loss."""

    trajectory: Trajectory
    advantage: np.ndarray
    weight: float


@dataclass(slots=True)
class Minibatch:
    """What one learner adds to one optimiser step: groups of samples that share a prompt."""

    groups: list[list[TrainSample]]

    def __len__(self) -> int:
        return sum(len(group) for group in self.groups)


@dataclass(slots=True)
class MicroBatch:
    """Padded arrays of one forward pass; B rows of L tokens, N sampled tokens.

    segments int16 [B, L]: 0 prompt, 1.. the continuations, -1 padding. `row`, `column` int64 [N] locate the hidden
    state that predicts `target` int64 [N]. behaviour, advantage and weight: float32 [N]. `sample`, `turn` int64 [N]: the
    trajectory of the micro-batch that a token belongs to, and its turn there; a trajectory is never split. trajectory_ids:
    those of the trajectories, by their place. returns: float32 [N], NaN where the critic learns nothing; None without one.
    next_images: those of the micro-batch that is computed after this one, to be read ahead.
    """

    input_ids: np.ndarray
    position_ids: np.ndarray
    segments: np.ndarray
    images: list[EncodedImage]
    row: np.ndarray
    column: np.ndarray
    target: np.ndarray
    behaviour: np.ndarray
    advantage: np.ndarray
    weight: np.ndarray
    sample: np.ndarray
    turn: np.ndarray
    trajectory_ids: list[str] = field(default_factory=list)
    returns: np.ndarray | None = None
    next_images: list[EncodedImage] = field(default_factory=list)

    def split(self, tokens: np.ndarray) -> dict[str, np.ndarray]:
        """An array [N] as the arrays of the trajectories, by id."""
        ends = np.cumsum(np.bincount(self.sample, minlength=len(self.trajectory_ids)))[:-1]
        return dict(zip(self.trajectory_ids, np.split(tokens, ends), strict=True))

    def join(self, tokens: Mapping[str, np.ndarray]) -> np.ndarray:
        """The inverse of `split`; other trajectories may be among them."""
        return np.concatenate([tokens[trajectory_id] for trajectory_id in self.trajectory_ids])


@dataclass(slots=True)
class _Row:
    ids: list[np.ndarray] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)
    segments: list[np.ndarray] = field(default_factory=list)
    images: list[EncodedImage] = field(default_factory=list)
    column: list[np.ndarray] = field(default_factory=list)
    target: list[np.ndarray] = field(default_factory=list)
    behaviour: list[np.ndarray] = field(default_factory=list)
    advantage: list[np.ndarray] = field(default_factory=list)
    weight: list[np.ndarray] = field(default_factory=list)
    turn: list[np.ndarray] = field(default_factory=list)
    trajectory_ids: list[str] = field(default_factory=list)
    length: int = 0


class BatchBuilder:
    """Packs minibatches for one model.

    Args:
        image_token_id, pad_token_id: token ids.
        images: the image geometry.
        max_tokens: padded tokens per micro-batch; a single longer row still goes alone.
        share_prompts: pack the samples of a group into one row where that pays.
        width: of the language model, where attention can be computed by segments; 0: under a dense mask.
    """

    def __init__(
        self,
        *,
        image_token_id: int,
        pad_token_id: int,
        images: ImageProcessorSpec,
        max_tokens: int,
        share_prompts: bool = True,
        width: int = 0,
    ) -> None:
        self._image_token_id = image_token_id
        self._pad_token_id = pad_token_id
        self._images = images
        self._max_tokens = max_tokens
        self._share_prompts = share_prompts
        self._width = width

    def build(self, minibatch: Minibatch) -> list[MicroBatch]:
        """Micro-batches in order of row length."""
        rows = [self._row(part) for group in minibatch.groups for part in self._split(group)]
        rows.sort(key=lambda row: row.length)
        batches: list[MicroBatch] = []
        start = 0
        while start < len(rows):
            stop = start + 1
            # Rows are sorted, so the next row's length is the padded length.
            while stop < len(rows) and (stop - start + 1) * rows[stop].length <= self._max_tokens:
                stop += 1
            batches.append(self._pad(rows[start:stop]))
            start = stop
        return batches

    def _split(self, group: list[TrainSample]) -> list[list[TrainSample]]:
        """The group as one row, or as one row per sample when packing does not pay or would be too long."""
        if not self._share_prompts or len(group) == 1:
            return [[sample] for sample in group]
        prefix = self._shared_prompt(group)
        lengths = [len(sample.trajectory) for sample in group]
        packed = prefix + sum(length - prefix for length in lengths)
        if not prefix or packed > self._max_tokens or not self._pays(packed, prefix, lengths):
            return [[sample] for sample in group]
        return [group]

    def _pays(self, packed: int, prefix: int, lengths: Sequence[int]) -> bool:
        """Whether a row of `packed` tokens costs less than rows of these `lengths`, which share the `prefix`."""
        squares = sum(length**2 for length in lengths)
        if packed**2 <= (1 + _MAX_ATTENTION_OVERHEAD) * squares:
            return True
        pairs = prefix**2 // 2 + sum((length - prefix) * length for length in lengths)
        saved = sum(lengths) - packed
        return saved * _PAIRS_PER_WIDTH * self._width > pairs - squares // 2

    def _row(self, group: list[TrainSample]) -> _Row:
        prefix = _prompt_length(group[0].trajectory)
        row = _Row()
        for number, sample in enumerate(group):
            trajectory = sample.trajectory
            grids, merge = self._grids(trajectory), self._images.merge_size
            positions = mrope_positions(trajectory.token_ids, self._image_token_id, grids, merge)
            start = prefix
            if number == 0:
                start = 0
                row.segments.append(np.full(prefix, _PREFIX, dtype=np.int16))
                row.images.extend(trajectory.images)
            else:
                row.images.extend(trajectory.images[self._prompt_images(trajectory) :])
            row.ids.append(trajectory.token_ids[start:])
            row.positions.append(positions[:, start:])
            row.segments.append(np.full(len(trajectory) - prefix, number + 1, dtype=np.int16))
            sampled = np.flatnonzero(trajectory.loss_mask)
            # Token t is predicted by the hidden state before it; the first of a continuation by the prompt's last.
            offset = row.length - start
            column = np.where(sampled == prefix, prefix - 1, sampled - 1 + offset)
            row.column.append(column)
            row.target.append(trajectory.token_ids[sampled].astype(np.int64))
            row.behaviour.append(trajectory.logprobs[sampled])
            row.advantage.append(sample.advantage)
            row.weight.append(np.full(len(sampled), sample.weight, dtype=np.float32))
            lengths = [turn.stop - turn.start for turn in trajectory.turns]
            row.turn.append(np.repeat(np.arange(len(lengths)), lengths))
            row.trajectory_ids.append(trajectory.trajectory_id)
            row.length += len(trajectory) - start
        return row

    def _shared_prompt(self, group: list[TrainSample]) -> int:
        """The length of the prompt when all samples have the same one, images included; else 0."""
        first = group[0].trajectory
        length, images = _prompt_length(first), [image.sha256 for image in first.images[: self._prompt_images(first)]]
        for sample in group[1:]:
            other = sample.trajectory
            if _prompt_length(other) != length or not np.array_equal(
                other.token_ids[:length], first.token_ids[:length]
            ):
                return 0
            if [image.sha256 for image in other.images[: len(images)]] != images:
                return 0
        return length

    def _prompt_images(self, trajectory: Trajectory) -> int:
        """How many of the trajectory's images stand in its prompt."""
        tokens = int((trajectory.token_ids[: _prompt_length(trajectory)] == self._image_token_id).sum())
        count = 0
        for t, h, w in self._grids(trajectory):
            tokens -= t * h * w // self._images.merge_size**2
            if tokens < 0:
                break
            count += 1
        return count

    def _grids(self, trajectory: Trajectory) -> list[tuple[int, int, int]]:
        return [self._images.grid_thw(image.width, image.height) for image in trajectory.images]

    def _pad(self, rows: Sequence[_Row]) -> MicroBatch:
        longest = max(row.length for row in rows)
        ids = np.full((len(rows), longest), self._pad_token_id, dtype=np.int64)
        positions = np.zeros((3, len(rows), longest), dtype=np.int64)
        segments = np.full((len(rows), longest), _PADDING, dtype=np.int16)
        for k, row in enumerate(rows):
            ids[k, : row.length] = np.concatenate(row.ids)
            positions[:, k, : row.length] = np.concatenate(row.positions, axis=1)
            segments[k, : row.length] = np.concatenate(row.segments)
        counts = [sum(len(part) for part in row.column) for row in rows]
        per_sample = [len(part) for row in rows for part in row.column]
        return MicroBatch(
            input_ids=ids,
            position_ids=positions,
            segments=segments,
            images=[image for row in rows for image in row.images],
            row=np.repeat(np.arange(len(rows)), counts),
            column=np.concatenate([part for row in rows for part in row.column]),
            target=np.concatenate([part for row in rows for part in row.target]),
            behaviour=np.concatenate([part for row in rows for part in row.behaviour]),
            advantage=np.concatenate([part for row in rows for part in row.advantage]),
            weight=np.concatenate([part for row in rows for part in row.weight]),
            sample=np.repeat(np.arange(len(per_sample)), per_sample),
            turn=np.concatenate([part for row in rows for part in row.turn]),
            trajectory_ids=[trajectory_id for row in rows for trajectory_id in row.trajectory_ids],
        )


def _prompt_length(trajectory: Trajectory) -> int:
    """Tokens before the first sampled one."""
    return int(np.argmax(trajectory.loss_mask))
