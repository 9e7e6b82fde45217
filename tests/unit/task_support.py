"""Hand-made groups for tests of task sources and rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_vlm.types import StopReason, Trajectory, TrajectoryGroup, TrajectoryStatus, Turn


def episode(name: str, rewards: Sequence[float] = (1.0,), tokens: int = 1, **info: Any) -> Trajectory:
    """One turn per reward, each of so many sampled tokens."""
    turns = tuple(
        Turn(1 + place * tokens, 1 + (place + 1) * tokens, 1, StopReason.END_OF_TURN, reward)
        for place, reward in enumerate(rewards)
    )
    total = 1 + tokens * len(rewards)
    sampled = np.arange(total) > 0
    logprobs = np.where(sampled, -1.0, 0.0).astype(np.float32)
    ids = np.arange(total, dtype=np.int32)
    return Trajectory(name, ids, sampled, logprobs, turns, TrajectoryStatus.COMPLETED, info=info).check()


def solved_group(solved: Sequence[float], env: str = "", index: int = 0, stage: int = 0) -> TrajectoryGroup:
    """A group of one-turn episodes with these rewards; those with 1 are correct."""
    name = f"{env}:{index}"
    members = [episode(f"{name}:{place}", (reward,)) for place, reward in enumerate(solved)]
    return TrajectoryGroup(name, index, members, env, stage)
