"""What the tests of labels share: segments with pictures, and a loop to run coroutines in."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from rl_vlm.control_envs.cartpole import draw_cartpole
from rl_vlm.labelling.labels import Segment, SegmentPair


def segment(angles: Sequence[float], size: int = 64) -> Segment:
    """A segment of the pole at these angles (degrees); the true reward is minus the angle."""
    degrees = np.asarray(angles, dtype=np.float32)
    observations = np.zeros((len(degrees), 4), dtype=np.float32)
    observations[:, 2] = np.deg2rad(degrees)
    frames = np.stack([draw_cartpole(math.radians(angle), size) for angle in degrees])
    return Segment(observations, np.zeros((len(degrees), 1), np.float32), -np.abs(degrees), frames)


def pair(first: float, second: float, size: int = 64) -> SegmentPair:
    """Two single frames at these angles (degrees)."""
    return SegmentPair(segment([first], size), segment([second], size))


def random_pairs(count: int, seed: int = 0, size: int = 64) -> list[SegmentPair]:
    """Single frames at random angles."""
    angles = np.random.default_rng(seed).uniform(-30, 30, (count, 2))
    return [pair(first, second, size) for first, second in angles]
