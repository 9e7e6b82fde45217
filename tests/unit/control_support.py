"""What tests of the preference loop share: steps of a made-up environment whose every number tells where it comes from."""

from __future__ import annotations

import numpy as np

from rl_vlm.preference.collector import StepBatch


def picture(value: int, size: int = 16) -> np.ndarray:
    """uint8 [size, size, 3] that `value` can be read from, with some noise around it."""
    frame = np.random.default_rng(value).integers(0, 256, (size, size, 3), dtype=np.uint8)
    frame[0, 0] = value % 256, value // 256 % 256, 0
    return frame


def number_of(frame: np.ndarray) -> int:
    """The value that `picture` put in."""
    return int(frame[0, 0, 0]) + 256 * int(frame[0, 0, 1])


def steps(first: int, count: int, episode: int = 0, start: int = 0, done: str = "", size: int = 0) -> StepBatch:
    """Steps number `first`, first + 1, ... of an episode from time `start` on; `done` says how the last one ends."""
    ids = np.arange(first, first + count)
    last = np.arange(count) == count - 1
    return StepBatch(
        observations=np.stack([ids, ids + 0.25], axis=1).astype(np.float32),
        actions=(ids[:, None] + 0.5).astype(np.float32),
        next_observations=np.stack([ids + 1, ids + 1.25], axis=1).astype(np.float32),
        true_rewards=(-ids).astype(np.float32),
        successes=(ids % 2).astype(np.float32),
        terminated=last & (done == "terminated"),
        truncated=last & (done == "truncated"),
        episodes=np.full(count, episode, np.int64),
        times=np.arange(start, start + count, dtype=np.int32),
        frames=np.stack([picture(int(k), size) for k in ids]) if size else None,
    )
