"""The replay buffer: a ring of steps with one array per field, and the frames of the newest rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from rl_vlm.labelling.labels import InputKind, Segment, SegmentPair
from rl_vlm.preference.collector import StepBatch
from rl_vlm.preference.frame_ring import FrameRing, check_ring
from rl_vlm.types import RLVLMError, UserInputError

_OF_BATCH = ("observations", "actions", "next_observations", "true_rewards", "successes", "episodes", "times")
_COLUMNS = (*_OF_BATCH, "rewards", "continues", "previous")


class NonFiniteStepError(RLVLMError):
    """An environment or a reward model gave nan or infinity.

    Do: repair the environment's rewards or observations, or lower the reward model's learning rate.
    """


class ReplayBuffer:
    """A ring of `capacity` steps. The agent learns from `rewards`.

    Truncated episodes go on for the critic (`continues` is 1), terminated ones do not. Where the reward is learned from
    images, `frame_capacity` must be at least `capacity`: a row without a frame could not be relabelled.
    """

    def __init__(
        self, capacity: int, observation_size: int, action_size: int, frame_capacity: int = 0, image_size: int = 0
    ) -> None:
        self.capacity = capacity
        self.total = 0  # steps ever added
        self.observations, self.next_observations = np.zeros((2, capacity, observation_size), np.float32)
        self.actions = np.zeros((capacity, action_size), np.float32)
        self.rewards, self.continues = np.zeros((2, capacity), np.float32)
        self.true_rewards, self.successes = np.zeros((2, capacity), np.float32)
        self.episodes = np.full(capacity, -1, np.int64)
        self.times = np.zeros(capacity, np.int32)
        self.previous = np.full(capacity, -1, np.int64)  # row of the step before, in the same episode
        self._open: dict[int, int] = {}  # last row of every episode that goes on
        self.frames = FrameRing(min(frame_capacity, capacity), image_size) if frame_capacity else None

    def __len__(self) -> int:
        return min(self.total, self.capacity)

    def add(self, batch: StepBatch, rewards: np.ndarray) -> None:
        """Append steps; `rewards` float32 [n] are those of the agent. Raises NonFiniteStepError and keeps nothing."""
        n = len(batch)
        for observations in (batch.observations, batch.next_observations):
            _check_finite("An observation of the environment", observations)
        _check_finite("A reward of the agent", rewards)
        rows = (self.total + np.arange(n)) % self.capacity
        for name in _OF_BATCH:
            getattr(self, name)[rows] = getattr(batch, name)
        self.rewards[rows] = rewards
        self.continues[rows] = ~batch.terminated
        done = batch.terminated | batch.truncated
        for row, episode, ended in zip(rows.tolist(), batch.episodes.tolist(), done.tolist(), strict=True):
            self.previous[row] = self._open.pop(episode, -1)
            if not ended:
                self._open[episode] = row
        if self.frames is not None:
            assert batch.frames is not None
            self.frames.add(batch.frames, batch.episodes)
        self.total += n

    def sample_rows(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """int64 [count]: rows drawn uniformly, with replacement."""
        return rng.integers(0, len(self), count)

    def relabel_with(self, kind: InputKind, rewards: Callable[[np.ndarray], np.ndarray], chunk: int = 256) -> None:
        """Replace the reward of every row by that of a reward model, which gets the inputs of `chunk` rows at a time;
        all or none. Raises NonFiniteStepError, and what `rewards` raises."""
        replaced = self.rewards.copy()
        for start in range(0, len(self), chunk):
            rows = np.arange(start, min(start + chunk, len(self)))
            state_actions = np.concatenate([self.observations[rows], self.actions[rows]], axis=1)
            replaced[rows] = rewards(self.frames_of(rows) if kind == "image" else state_actions)
        _check_finite("A reward of the reward model", replaced)
        self.rewards[:] = replaced

    def frames_of(self, rows: np.ndarray) -> np.ndarray:
        """uint8 [n, S, S, 3]. Raises IndexError for rows whose frame has been overwritten."""
        assert self.frames is not None
        ages = self._ages(rows)
        if len(ages) and ages.max() >= len(self.frames):
            raise IndexError(f"Only the newest {len(self.frames)} steps have frames.")
        return self.frames.get((self.total - 1 - ages) % self.frames.capacity)

    def _ages(self, rows: np.ndarray) -> np.ndarray:
        # 0 for the newest row.
        return (self.total - 1 - rows) % self.capacity

    def sample_pairs(
        self, count: int, length: int, rng: np.random.Generator, newest: int | None = None
    ) -> list[SegmentPair]:
        """Up to `count` pairs of two segments of `length` steps that end within the `newest` rows, with frames where
        there are any; fewer where the buffer does not hold enough."""
        reach = min(len(self), newest or len(self))
        if self.frames is not None:
            reach = min(reach, len(self.frames))
        if reach < 2:
            return []
        pairs: list[SegmentPair] = []
        for _ in range(20):  # rows at the start of an episode cannot end a segment, and are drawn again
            missing = count - len(pairs)
            if missing <= 0:
                break
            ends = (self.total - 1 - rng.integers(0, reach, (missing, 2))) % self.capacity
            rows, whole = self._walk_back(ends.reshape(-1), length, reach)
            usable = whole.reshape(-1, 2).all(1) & (ends[:, 0] != ends[:, 1])
            rows = rows.reshape(-1, 2, length)[usable]
            pairs += [SegmentPair(self._segment(first), self._segment(second)) for first, second in rows]
        return pairs

    def _walk_back(self, ends: np.ndarray, length: int, reach: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows int64 [n, length] that lead to `ends`, and bool [n] whether all of them are still there."""
        rows = np.empty((len(ends), length), np.int64)
        whole = np.ones(len(ends), bool)
        current = ends
        rows[:, -1] = current
        for index in range(length - 2, -1, -1):
            before = self.previous[current]
            # A row that was overwritten holds another episode, or another time of it.
            whole &= (before >= 0) & (self._ages(before) < reach)
            whole &= (self.episodes[before] == self.episodes[current]) & (self.times[before] == self.times[current] - 1)
            rows[:, index] = current = np.where(before >= 0, before, current)
        return rows, whole

    def _segment(self, rows: np.ndarray) -> Segment:
        frames = None if self.frames is None else self.frames_of(rows)
        return Segment(self.observations[rows], self.actions[rows], self.true_rewards[rows], frames)

    def state(self) -> dict[str, np.ndarray]:
        arrays = {name: getattr(self, name)[: len(self)] for name in _COLUMNS}
        arrays["total"] = np.array([self.total])
        arrays["open"] = np.array(sorted(self._open.items()), np.int64).reshape(-1, 2)
        if self.frames is not None:
            arrays |= {f"frames.{name}": array for name, array in self.frames.state().items()}
        return arrays

    def load(self, state: Mapping[str, Any]) -> None:
        """Raises UserInputError when the state does not fit."""
        arrays = {name: np.asarray(array) for name, array in state.items()}
        size, shapes = len(arrays["rewards"]), (arrays["observations"].shape[1:], arrays["actions"].shape[1:])
        check_ring(int(arrays["total"][0]), size, self.capacity, "preference.replay_capacity")
        if shapes != (self.observations.shape[1:], self.actions.shape[1:]):
            raise UserInputError("The checkpoint's replay buffer comes from another environment: use its own env.id.")
        if (self.frames is not None) != ("frames.total" in arrays):
            raise UserInputError("The checkpoint was made with frames and this run has none, or the other way round.")
        for name in _COLUMNS:
            getattr(self, name)[:size] = arrays[name]
        self.total = int(arrays["total"][0])
        self._open = {int(episode): int(row) for episode, row in arrays["open"]}
        if self.frames is not None:
            self.frames.load({name[7:]: array for name, array in arrays.items() if name.startswith("frames.")})


def _check_finite(what: str, values: np.ndarray) -> None:
    if not np.isfinite(values).all():  # a single nan in a batch turns all weights of the agent into nan
        raise NonFiniteStepError(
            f"{what} is nan or infinite, and would make all weights of the agent nan. Correct its source."
        )
