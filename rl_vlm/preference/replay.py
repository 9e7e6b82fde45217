"""The replay buffer: steps, and the pictures of the newest of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pyarrow as pa

from rl_vlm.labelling.types import InputKind, Segment, SegmentPair
from rl_vlm.types import RLVLMError, UserInputError

_CODEC = pa.Codec("zstd", compression_level=1)
_DECODED_KEYS = 16  # kept decompressed: one per environment that is being stepped, and a few more


class FrameRing:
    """The newest `capacity` frames of one size: frame number n is in slot n % capacity."""

    def __init__(self, capacity: int, image_size: int) -> None:
        self.capacity, self.image_size = capacity, image_size
        self.total = 0  # frames ever added
        self._payloads: list[bytes] = [b""] * capacity
        self._episodes = np.full(capacity, -1, np.int64)
        self._keys: dict[int, bytes] = {}  # first frame of each episode that is still needed
        self._users: dict[int, int] = {}  # frames in the ring per episode
        self._decoded: OrderedDict[int, np.ndarray] = OrderedDict()
        self._black = np.zeros((image_size, image_size, 3), np.uint8)  # the key of first frames

    def __len__(self) -> int:
        return min(self.total, self.capacity)

    @property
    def nbytes(self) -> int:
        """Bytes of all compressed frames, Python's own overhead included."""
        overhead = len(self) * (33 + 8 + 8)  # a bytes object, its place in the list, its episode
        keys = sum(len(key) + 300 for key in self._keys.values())
        # An upper bound of the cache of decoded first frames, whose size depends on the last calls.
        decoded = min(len(self._keys), _DECODED_KEYS) * self.image_size**2 * 3
        return sum(map(len, self._payloads)) + overhead + keys + decoded

    def add(self, frames: np.ndarray, episodes: Sequence[int] | np.ndarray) -> None:
        """Append frames uint8 [n, S, S, 3]; `episodes` [n] are their episode numbers, which are never reused."""
        size = self.image_size
        if frames.dtype != np.uint8 or frames.shape[1:] != (size, size, 3):
            raise ValueError(f"Frames must be uint8 [n, {size}, {size}, 3], not {frames.dtype} {frames.shape}.")
        for frame, episode in zip(frames, np.asarray(episodes).tolist(), strict=True):
            slot = self.total % self.capacity
            self._clear(slot)
            if episode not in self._keys:
                self._keys[episode] = pack(frame, self._black)
                self._users[episode] = 0
                self._cache_key(episode, frame.copy())
            self._payloads[slot] = pack(frame, self._key(episode))
            self._episodes[slot] = episode
            self._users[episode] += 1
            self.total += 1

    def get(self, slots: np.ndarray) -> np.ndarray:
        """uint8 [n, S, S, 3]: the frames in these slots, which hold one each."""
        size = self.image_size
        frames = np.empty((len(slots), size, size, 3), np.uint8)
        # By episode, so that each first frame is decompressed once.
        for index in np.argsort(self._episodes[slots], kind="stable").tolist():
            slot = int(slots[index])
            key = self._key(int(self._episodes[slot]))
            frames[index] = unpack(self._payloads[slot], key, key.shape)
        return frames

    def state(self) -> dict[str, np.ndarray]:
        """Everything as arrays, for `load`."""
        keys = sorted(self._keys)
        used = self._payloads[: len(self)]
        return {
            "total": np.array([self.total]),
            "data": np.frombuffer(b"".join(used), np.uint8),
            "lengths": np.array([len(payload) for payload in used], np.int64),
            "episodes": self._episodes[: len(self)].copy(),
            "key_data": np.frombuffer(b"".join(self._keys[key] for key in keys), np.uint8),
            "key_lengths": np.array([len(self._keys[key]) for key in keys], np.int64),
            "key_episodes": np.array(keys, np.int64),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Replace the content by a saved one. Raises UserInputError when it does not fit."""
        arrays = {name: np.asarray(array) for name, array in state.items()}
        used = _split(arrays["data"], arrays["lengths"])
        if len(used) > self.capacity:
            raise UserInputError(
                f"The checkpoint holds {len(used)} frames and the ring {self.capacity}: keep preference.frame_capacity."
            )
        total = int(arrays["total"][0])
        if total > len(used) != self.capacity:  # older frames were overwritten, so slots depend on the capacity
            raise UserInputError(
                f"The checkpoint's ring of {len(used)} frames was full, and this one has {self.capacity}: keep "
                "preference.frame_capacity."
            )
        keys = _split(arrays["key_data"], arrays["key_lengths"])
        self.total = total
        self._payloads = used + [b""] * (self.capacity - len(used))
        self._episodes[:] = -1
        self._episodes[: len(used)] = arrays["episodes"]
        self._keys = dict(zip(arrays["key_episodes"].tolist(), keys, strict=True))
        numbers, counts = np.unique(arrays["episodes"], return_counts=True)
        self._users = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
        self._decoded.clear()

    def _clear(self, slot: int) -> None:
        episode = int(self._episodes[slot])
        if episode < 0:
            return
        self._users[episode] -= 1
        if not self._users[episode]:
            for store in (self._users, self._keys, self._decoded):
                store.pop(episode, None)  # type: ignore[attr-defined]
        self._payloads[slot], self._episodes[slot] = b"", -1

    def _key(self, episode: int) -> np.ndarray:
        key = self._decoded.get(episode)
        if key is None:
            key = unpack(self._keys[episode], self._black, self._black.shape)
            self._cache_key(episode, key)
        else:
            self._decoded.move_to_end(episode)
        return key

    def _cache_key(self, episode: int, frame: np.ndarray) -> None:
        self._decoded[episode] = frame
        if len(self._decoded) > _DECODED_KEYS:
            self._decoded.popitem(last=False)


def pack(pictures: np.ndarray, key: np.ndarray) -> bytes:
    """Pictures uint8 [..., H, W, 3] as their compressed difference to `key` [H, W, 3]."""
    return _CODEC.compress(np.ascontiguousarray(pictures - key), asbytes=True)  # type: ignore[no-any-return]


def unpack(data: bytes, key: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The pictures uint8 of `shape` that `pack` was given."""
    difference = np.frombuffer(_CODEC.decompress(data, int(np.prod(shape))), np.uint8).reshape(shape)
    return difference + key


def _split(data: np.ndarray, lengths: np.ndarray) -> list[bytes]:
    ends = np.cumsum(lengths).tolist()
    whole = data.tobytes()
    return [whole[end - length : end] for end, length in zip(ends, lengths.tolist(), strict=True)]


# The replay buffer: a ring of steps with one array per field, and the frames of the newest rows.

_COLUMNS = (
    "observations", "actions", "next_observations", "rewards", "continues", "true_rewards", "successes",
    "episodes", "times", "previous",
)  # fmt: skip


class NotFiniteError(RLVLMError):
    """An environment or a reward model gave nan or infinity."""


@dataclass(slots=True)
class StepBatch:
    """n steps of any number of environments, each environment's in the order in which they happened.

    observations, next_observations float32 [n, O]; actions float32 [n, A]; true_rewards, successes float32 [n];
    terminated, truncated bool [n]; episodes int64 [n], numbers that are never reused; times int32 [n], from 0; frames
    uint8 [n, S, S, 3], drawn after the step, or None.
    """

    observations: np.ndarray
    actions: np.ndarray
    next_observations: np.ndarray
    true_rewards: np.ndarray
    successes: np.ndarray
    terminated: np.ndarray
    truncated: np.ndarray
    episodes: np.ndarray
    times: np.ndarray
    frames: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.actions)

    @classmethod
    def concatenate(cls, batches: list[StepBatch]) -> StepBatch:
        """One batch of all rows, in order."""
        if len(batches) == 1:
            return batches[0]
        values: dict[str, Any] = {}
        for field in fields(cls):
            parts = [getattr(batch, field.name) for batch in batches]
            values[field.name] = None if parts[0] is None else np.concatenate(parts)
        return cls(**values)


class ReplayBuffer:
    """A ring of `capacity` steps.

    `rewards` are those that the agent learns from; `relabel_with` replaces them. Truncated episodes go on for the
    critic (`continues` is 1), terminated ones do not. Where the reward is learned from images, `frame_capacity` must be
    at least `capacity`: a row without a frame could not be relabelled.
    """

    def __init__(
        self, capacity: int, observation_size: int, action_size: int, frame_capacity: int = 0, image_size: int = 0
    ) -> None:
        self.capacity = capacity
        self.total = 0  # steps ever added
        self.observations = np.zeros((capacity, observation_size), np.float32)
        self.actions = np.zeros((capacity, action_size), np.float32)
        self.next_observations = np.zeros((capacity, observation_size), np.float32)
        self.rewards = np.zeros(capacity, np.float32)
        self.continues = np.zeros(capacity, np.float32)
        self.true_rewards = np.zeros(capacity, np.float32)
        self.successes = np.zeros(capacity, np.float32)
        self.episodes = np.full(capacity, -1, np.int64)
        self.times = np.zeros(capacity, np.int32)
        self.previous = np.full(capacity, -1, np.int64)  # row of the step before, in the same episode
        self._open: dict[int, int] = {}  # last row of every episode that goes on
        self.frames = FrameRing(min(frame_capacity, capacity), image_size) if frame_capacity else None

    def __len__(self) -> int:
        return min(self.total, self.capacity)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays and frames."""
        arrays = sum(getattr(self, name).nbytes for name in _COLUMNS)
        return arrays + (self.frames.nbytes if self.frames is not None else 0)

    def add(self, batch: StepBatch, rewards: np.ndarray) -> None:
        """Append steps; `rewards` float32 [n] are those of the agent. Raises NotFiniteError and keeps nothing."""
        n = len(batch)
        if n > self.capacity:
            raise ValueError(f"A batch of {n} steps does not fit into a ring of {self.capacity}.")
        for observations in (batch.observations, batch.next_observations):
            _check_finite("An observation of the environment", observations)
        _check_finite("A reward of the agent", rewards)
        rows = (self.total + np.arange(n)) % self.capacity
        self.observations[rows] = batch.observations
        self.actions[rows] = batch.actions
        self.next_observations[rows] = batch.next_observations
        self.rewards[rows] = rewards
        self.continues[rows] = 1.0 - batch.terminated.astype(np.float32)
        self.true_rewards[rows] = batch.true_rewards
        self.successes[rows] = batch.successes
        self.episodes[rows] = batch.episodes
        self.times[rows] = batch.times
        done = batch.terminated | batch.truncated
        for row, episode, ended in zip(rows.tolist(), batch.episodes.tolist(), done.tolist(), strict=True):
            self.previous[row] = self._open.pop(episode, -1)
            if not ended:
                self._open[episode] = row
        if self.frames is not None:
            if batch.frames is None:
                raise ValueError("This replay buffer keeps frames, and the batch has none.")
            self.frames.add(batch.frames, batch.episodes)
        self.total += n

    def sample_rows(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """int64 [count]: rows drawn uniformly, with replacement."""
        return rng.integers(0, len(self), count)

    def relabel_with(self, kind: InputKind, rewards: Callable[[np.ndarray], np.ndarray], chunk: int = 256) -> None:
        """Replace the reward of every row by that of a reward model, which gets the inputs of `chunk` rows at a time.

        Raises NotFiniteError.
        """
        for start in range(0, len(self), chunk):
            rows = np.arange(start, min(start + chunk, len(self)))
            if kind == "image":
                inputs = self.frames_of(rows)
            else:
                inputs = np.concatenate([self.observations[rows], self.actions[rows]], axis=1)
            relabelled = rewards(inputs)
            _check_finite("A reward of the reward model", relabelled)
            self.rewards[rows] = relabelled

    def frames_of(self, rows: np.ndarray) -> np.ndarray:
        """uint8 [n, S, S, 3]. Raises IndexError for rows whose frame has been overwritten."""
        if self.frames is None:
            raise IndexError("This replay buffer keeps no frames.")
        ages = self._ages(rows)
        if len(ages) and ages.max() >= len(self.frames):
            raise IndexError(f"Only the newest {len(self.frames)} steps have frames.")
        return self.frames.get((self.total - 1 - ages) % self.frames.capacity)

    def _ages(self, rows: np.ndarray) -> np.ndarray:
        """0 for the newest row."""
        return (self.total - 1 - rows) % self.capacity

    def sample_pairs(
        self, count: int, length: int, rng: np.random.Generator, newest: int | None = None
    ) -> list[SegmentPair]:
        """Up to `count` pairs of segments of `length` steps that end within the `newest` rows; with frames where there
        are any.

        Fewer where the buffer does not hold enough; a pair is never a segment and itself.
        """
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
        """All rows in use as arrays, for `load`."""
        arrays = {name: getattr(self, name)[: len(self)] for name in _COLUMNS}
        arrays["total"] = np.array([self.total])
        arrays["open"] = np.array(sorted(self._open.items()), np.int64).reshape(-1, 2)
        if self.frames is not None:
            arrays |= {f"frames.{name}": array for name, array in self.frames.state().items()}
        return arrays

    def load(self, state: Mapping[str, Any]) -> None:
        """Replace the content by a saved one. Raises UserInputError when it does not fit."""
        arrays = {name: np.asarray(array) for name, array in state.items()}
        size, shapes = len(arrays["rewards"]), (arrays["observations"].shape[1:], arrays["actions"].shape[1:])
        if size > self.capacity or (size < self.capacity and int(arrays["total"][0]) > size):
            raise UserInputError(
                f"The checkpoint's replay buffer has {size} rows and this one {self.capacity}: keep "
                "preference.replay_capacity as it was."
            )
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
    """Raise NotFiniteError: a single nan in a batch turns all weights of the agent into nan, and the checkpoint keeps
    them."""
    if not np.isfinite(values).all():
        raise NotFiniteError(f"{what} is nan or infinite: the agent would learn nothing any more. Mend what gave it.")
