"""Pictures in memory, compressed without loss, and a ring buffer of them.

Pictures from a fixed camera are similar. So each is kept as its difference (modulo 256) to a key picture, compressed by
zstd: MetaWorld's take a tenth of their size or less, and a third without the key.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from rl_vlm.types import UserInputError

_CODEC = pa.Codec("zstd", compression_level=1)
_DECODED_KEYS = 16  # kept decompressed: one per environment that is being stepped, and a few more


class FrameRing:
    """The newest `capacity` frames of one size: frame number n is in slot n % capacity."""

    def __init__(self, capacity: int, image_size: int) -> None:
        if capacity < 1:
            raise ValueError("A frame ring holds at least one frame.")
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
        """uint8 [n, S, S, 3]: the frames in these slots."""
        size = self.image_size
        frames = np.empty((len(slots), size, size, 3), np.uint8)
        # By episode, so that each first frame is decompressed once.
        for place in np.argsort(self._episodes[slots], kind="stable").tolist():
            slot = int(slots[place])
            if not self._payloads[slot]:
                raise IndexError(f"Slot {slot} holds no frame.")
            key = self._key(int(self._episodes[slot]))
            frames[place] = unpack(self._payloads[slot], key, key.shape)
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
