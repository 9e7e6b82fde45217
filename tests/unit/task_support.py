"""Hand-made groups for tests of task sources and rewards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from rl_vlm.types import StopReason, Trajectory, TrajectoryGroup, TrajectoryStatus, Turn
from rl_vlm.zoo.gridwalk.grids import Cell, Grid


def trajectory(
    name: str, turns: Iterable[tuple[Any, ...]], before: int = 1, version: int = 0, **more: Any
) -> Trajectory:
    """Turns of (sampled tokens, reward, state), each behind `before` tokens of the environment."""
    mask: list[bool] = []
    made = []
    for tokens, *outcome in turns:
        mask += [False] * before + [True] * tokens
        made.append(Turn(len(mask) - tokens, len(mask), version, StopReason.END_OF_TURN, *outcome))
    sampled = np.array(mask, dtype=bool)
    ids, logprobs = np.arange(len(mask), dtype=np.int32), np.where(sampled, -1, 0).astype(np.float32)
    return Trajectory(name, ids, sampled, logprobs, tuple(made), TrajectoryStatus.COMPLETED, **more).check()


def episode(name: str, rewards: Sequence[float] = (1.0,), tokens: int = 1, **info: Any) -> Trajectory:
    """One turn per reward, each of so many sampled tokens."""
    return trajectory(name, [(tokens, reward) for reward in rewards], version=1, info=info)


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
