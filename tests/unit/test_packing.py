"""Pickling packs arrays; what comes back equals what went in."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from rl_vlm.types import (
    Completion,
    EncodedImage,
    Message,
    Sample,
    StopReason,
    Trajectory,
    TrajectoryGroup,
    TrajectoryStatus,
    Turn,
)


def same(one: Any, two: Any) -> bool:
    """Equal in every field, arrays by value and dtype."""
    if isinstance(one, np.ndarray):
        return isinstance(two, np.ndarray) and one.dtype == two.dtype and np.array_equal(one, two)
    if isinstance(one, (Trajectory, TrajectoryGroup, Completion, Sample)):
        return type(one) is type(two) and all(same(getattr(one, f), getattr(two, f)) for f in one.__slots__)
    if isinstance(one, (list, tuple)):
        return type(one) is type(two) and len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


def trajectory(number: int, length: int) -> Trajectory:
    mask = np.arange(length) >= 2
    return Trajectory(
        f"g:{number}",
        np.arange(length, dtype=np.int32) + number,
        mask,
        np.where(mask, -0.5 * number, 0).astype(np.float32),
        (Turn(2, length, 7, StopReason.STOP, 0.25), Turn(length, length + 1, 8, StopReason.LENGTH)),
        TrajectoryStatus.TRUNCATED,
        (EncodedImage("hash", b"png", 3, 4),),
        {"correct": True, "score": 0.5},
        (Message.of("user", "hello"),),
        "why",
        ("replica-1",),
    )


def test_a_group_comes_back_as_it_was() -> None:
    group = TrajectoryGroup("g", 3, [trajectory(k, length) for k, length in enumerate((5, 3, 9))])
    back = pickle.loads(pickle.dumps(group))
    assert same(group, back)
    assert not same(group.trajectories[0], back.trajectories[1])


def test_a_completion_comes_back_as_it_was() -> None:
    samples = tuple(
        Sample(np.arange(n, dtype=np.int32), -np.arange(n, dtype=np.float32), StopReason.END_OF_TURN) for n in (1, 4, 2)
    )
    completion = Completion("r", np.arange(9, dtype=np.int32), samples, 5, "replica", 0.5, 0.25)
    back = pickle.loads(pickle.dumps(completion))
    assert same(completion, back)
    assert [len(sample.token_ids) for sample in back.samples] == [1, 4, 2]
