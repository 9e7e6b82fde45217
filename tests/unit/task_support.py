"""Hand-made groups for tests of task sources and rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_vlm.types import StopReason, Trajectory, TrajectoryGroup, TrajectoryStatus, Turn
from rl_vlm.zoo.gridwalk.environment import Cell, Grid


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


def grid_of(*rows: str) -> Grid:
    """From rows of `A` (agent), `G` (goal), `#` (wall), `O` (hole) and `.`: `grid_of("A.", "#G")`."""
    cells: dict[str, list[Cell]] = {mark: [] for mark in "AG#O."}
    for row, line in enumerate(rows):
        for column, mark in enumerate(line):
            cells[mark].append((row, column))
    (agent,), (goal,) = cells["A"], cells["G"]
    return Grid(len(rows), agent, goal, frozenset(cells["#"]), frozenset(cells["O"]))
