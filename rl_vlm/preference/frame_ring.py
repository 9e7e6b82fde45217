"""Pictures in memory: compressed as differences, and the newest of them in a ring."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import pyarrow as pa

from rl_vlm.types import UserInputError

_CODEC = pa.Codec("zstd", compression_level=1)


class FrameRing:
    """The newest `capacity` frames of one size: frame number n is in slot n % capacity, as its compressed difference to
    the first frame of its episode, which is compressed whole."""

    def __init__(self, capacity: int, image_size: int) -> None:
        self.capacity = capacity
        self.total = 0  # frames ever added
        self._black = np.zeros((image_size, image_size, 3), np.uint8)
        self._frames = [(b"", b"")] * capacity  # first frame of the episode, difference
        self._open: dict[int, tuple[bytes, np.ndarray]] = {}  # first frame of each episode that goes on

    def __len__(self) -> int:
        return min(self.total, self.capacity)

    def add(self, frames: np.ndarray, episodes: np.ndarray) -> None:
        """Append frames uint8 [n, S, S, 3] of the `episodes` [n]; each call has some of every open episode."""
        if frames.dtype != np.uint8 or frames.shape[1:] != self._black.shape:
            raise ValueError(f"Frames must be uint8 [n, *{self._black.shape}], not {frames.dtype} {frames.shape}.")
        known, self._open = self._open, {}
        for frame, episode in zip(frames, episodes.tolist(), strict=True):
            first = self._open.get(episode) or known.get(episode) or (pack(frame, self._black), frame.copy())
            self._open[episode] = first
            self._frames[self.total % self.capacity] = first[0], pack(frame, first[1])
            self.total += 1

    def get(self, slots: np.ndarray) -> np.ndarray:
        """uint8 [n, S, S, 3]: the frames in these slots, which hold one each."""
        frames = np.empty((len(slots), *self._black.shape), np.uint8)
        packed, first = b"", self._black
        for index, slot in enumerate(slots.tolist()):
            if self._frames[slot][0] is not packed:  # slots beside each other are mostly of one episode
                packed = self._frames[slot][0]
                first = unpack(packed, self._black, self._black.shape)
            frames[index] = unpack(self._frames[slot][1], first, first.shape)
        return frames

    def state(self) -> dict[str, np.ndarray]:
        used = self._frames[: len(self)]
        firsts = [first for first, _ in used] + [first for first, _ in self._open.values()]
        unique = {id(first): first for first in firsts}
        numbers = {key: number for number, key in enumerate(unique)}
        return {
            "total": np.array([self.total]),
            **_joined("firsts", unique.values()),
            **_joined("differences", [difference for _, difference in used]),
            "first": np.array([numbers[id(first)] for first in firsts], np.int64),  # of each frame and open episode
            "open": np.array(list(self._open), np.int64),
        }

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Raises UserInputError when the state does not fit."""
        self.total = int(state["total"][0])
        unique, differences = _split(state, "firsts"), _split(state, "differences")
        size = len(differences)
        check_ring(self.total, size, self.capacity, "preference.frame_capacity")
        firsts = [unique[number] for number in state["first"].tolist()]
        self._frames[:size] = zip(firsts, differences, strict=False)
        self._open = {
            episode: (first, unpack(first, self._black, self._black.shape))
            for episode, first in zip(state["open"].tolist(), firsts[size:], strict=True)
        }


def _joined(name: str, parts: Collection[bytes]) -> dict[str, np.ndarray]:
    lengths = np.array([len(part) for part in parts], np.int64)
    return {name: np.frombuffer(b"".join(parts), np.uint8), f"{name}_lengths": lengths}


def _split(state: Mapping[str, np.ndarray], name: str) -> list[bytes]:
    ends, data = np.cumsum(state[f"{name}_lengths"]).tolist(), state[name].tobytes()
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def check_ring(total: int, size: int, capacity: int, setting: str) -> None:
    """Raise UserInputError if the `size` newest of `total` rows of a ring would have other places in this one."""
    if not (size == total <= capacity or size == capacity):
        raise UserInputError(
            f"The checkpoint holds {size} of {total} steps, and this run has room for {capacity}: keep {setting} as it "
            "was."
        )


def pack(pictures: np.ndarray, key: np.ndarray) -> bytes:
    """Pictures uint8 [..., H, W, 3] as their compressed difference to `key` [H, W, 3]."""
    return _CODEC.compress(np.ascontiguousarray(pictures - key), asbytes=True)  # type: ignore[no-any-return]


def unpack(data: bytes, key: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    difference = np.frombuffer(_CODEC.decompress(data, int(np.prod(shape))), np.uint8).reshape(shape)
    return difference + key
