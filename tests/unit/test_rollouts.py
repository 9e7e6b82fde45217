"""Rounds ahead of the learner: every task has its own number and seed, nothing that is finished is lost, nothing too old is used."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_vlm.config import RunConfig, parse_config
from rl_vlm.rollout.cursor import DataCursor
from rl_vlm.rollout.group_buffer import GroupBuffer
from rl_vlm.rollout.rollouts import Rollouts
from rl_vlm.rollout.task_stream import TaskStream
from rl_vlm.rollout.tasks import RolloutResult, RolloutTask
from rl_vlm.types import StopReason, Trajectory, TrajectoryGroup, TrajectoryStatus, Turn


def group(name: str, version: int = 0) -> TrajectoryGroup:
    turn = Turn(1, 2, version, StopReason.END_OF_TURN, 1.0)
    trajectory = Trajectory(
        f"{name}:0", np.arange(2, dtype=np.int32), np.array([False, True]), np.array([0, -1], dtype=np.float32), (turn,),
        TrajectoryStatus.COMPLETED, replica_ids=("replica",),
    ).check()  # fmt: skip
    return TrajectoryGroup(name, 0, [trajectory])


def run_of(lag: int = 0, prompts: int = 3, **logging: Any) -> RunConfig:
    return parse_config({"rollout": {"prompts_per_iteration": prompts, "max_policy_lag": lag}, "logging": logging})


class InstantSampler:
    """Answers every task with one group of the version that it asks for; `lose` names tasks that are lost."""

    restarts = 0

    def __init__(self) -> None:
        self.started: list[list[RolloutTask]] = []
        self.prepared: list[list[RolloutTask]] = []
        self.lose: set[str] = set()

    def start(self, tasks: list[RolloutTask], timeout_s: float | None = None) -> list[RolloutTask]:
        self.started.append(tasks)
        return tasks

    def prepare(self, tasks: list[RolloutTask]) -> None:
        self.prepared.append(tasks)

    def collect(self, tasks: list[RolloutTask], stop: Any) -> tuple[list[TrajectoryGroup], RolloutResult]:
        lost = {task.group_id: "lost" for task in tasks if task.group_id in self.lose}
        found = [group(task.group_id, task.min_version) for task in tasks if task.group_id not in lost]
        return found, RolloutResult(groups=found, lost=lost)


def rollouts_of(run: RunConfig, items: int | None = 100) -> tuple[Rollouts, InstantSampler]:
    sampler = InstantSampler()
    return Rollouts(sampler, TaskStream(DataCursor(items, run.seed), run), run), sampler  # type: ignore[arg-type]


@pytest.mark.parametrize("lag", [0, 1, 2, 5])
def test_rounds_have_numbers_and_seeds_of_their_own_at_any_lag(lag: int) -> None:
    run = run_of(lag, trajectories_every=2)
    rollouts, sampler = rollouts_of(run)
    for update in range(6):
        rollouts.next_groups(update, iterations_left=5 - update)
        rollouts.open_next()
    tasks = [task for tasks in sampler.started for task in tasks]
    assert [int(task.group_id.split(":")[0]) for task in tasks] == [number for number in range(6) for _ in range(3)]
    assert len({task.sampling_seed for task in tasks}) == len({task.group_id for task in tasks}) == 18
    # Every second round is recorded, whatever the lag.
    assert [tasks[0].record for tasks in sampler.started] == [True, False] * 3


def test_no_more_rounds_are_started_than_iterations_are_left() -> None:
    rollouts, sampler = rollouts_of(run_of(lag=4))
    rollouts.next_groups(0, iterations_left=2)
    assert len(sampler.started) == 3
    rollouts.next_groups(1, iterations_left=1)
    rollouts.next_groups(2, iterations_left=0)
    assert len(sampler.started) == 3


def test_the_round_that_was_opened_ahead_asks_for_the_version_of_its_start() -> None:
    rollouts, sampler = rollouts_of(run_of())
    rollouts.next_groups(0, iterations_left=9)
    rollouts.open_next()
    rollouts.next_groups(7, iterations_left=8)
    assert [task.group_id for task in sampler.prepared[0]] == [task.group_id for task in sampler.started[1]]
    assert {task.min_version for task in sampler.started[1]} == {7}


def test_lost_groups_are_counted_and_do_not_come_again() -> None:
    rollouts, sampler = rollouts_of(run_of())
    sampler.lose = {"000000:00001"}
    assert [g.group_id for g in rollouts.next_groups(0, 9)] == ["000000:00000", "000000:00002"]
    assert rollouts.dropped == {"group_lost": 1}
    assert rollouts.state()["tasks"]["open"] == []


@pytest.mark.parametrize("lag", [0, 2])
def test_what_was_under_way_comes_first_after_a_resume(lag: int) -> None:
    run = run_of(lag)
    rollouts, sampler = rollouts_of(run)
    rollouts.next_groups(0, iterations_left=9)
    rollouts.open_next()
    state = json.loads(json.dumps(rollouts.state()))
    whole = [task for tasks in sampler.started + sampler.prepared for task in tasks]
    resumed, again = rollouts_of(run)
    resumed.restore(state, counts=True)
    for update in range(4):
        resumed.next_groups(1 + update, iterations_left=8 - update)
    seen = [task for tasks in again.started for task in tasks]

    def identity(task: RolloutTask) -> tuple[Any, ...]:
        return task.group_id, task.index, task.seed, task.sampling_seed

    # The learned round does not come again; what was being sampled or opened does, in order, then new items.
    assert list(map(identity, seen[: len(whole) - 3])) == list(map(identity, whole[3:]))
    uninterrupted, sampler = rollouts_of(run)
    for update in range(9):
        uninterrupted.next_groups(update, iterations_left=9 - update)
    expected = [identity(task) for tasks in sampler.started for task in tasks]
    assert list(map(identity, seen)) == expected[3 : 3 + len(seen)]
    assert resumed.trajectories == 15


def test_a_second_interruption_loses_nothing_either() -> None:
    """It may come before the tasks of the first one were handed out again, in part or in whole."""
    run = run_of(lag=2)
    rollouts, _ = rollouts_of(run)
    rollouts.next_groups(0, iterations_left=9)
    first = rollouts.state()["tasks"]
    assert len(first["open"]) == 6
    once, _ = rollouts_of(run)
    once.restore(json.loads(json.dumps(rollouts.state())), counts=True)
    assert once.state()["tasks"] == first
    twice, sampler = rollouts_of(run)
    twice.restore(once.state(), counts=True)
    twice._start_round(0)  # one round of the two is under way, the other waits
    assert [task.group_id for task in sampler.started[0]] == [task["group_id"] for task in first["open"][:3]]
    assert [task["group_id"] for task in twice.state()["tasks"]["open"]] == [task["group_id"] for task in first["open"]]


# --- the buffer


def test_the_buffer_gives_the_oldest_groups_first_and_keeps_the_rest() -> None:
    buffer = GroupBuffer(max_lag=2)
    buffer.add([group("b", 1), group("c", 1)])
    buffer.add([group("a", 1)])
    taken, stale = buffer.take(2, version=2)
    assert [g.group_id for g in taken] == ["a", "b"] and stale == [] and len(buffer) == 1
    taken, stale = buffer.take(2, version=4)
    assert taken == [] and [g.group_id for g in stale] == ["c"] and len(buffer) == 0


@settings(max_examples=100, deadline=None)
@given(
    lag=st.integers(0, 4),
    steps=st.lists(st.tuples(st.lists(st.integers(0, 3), max_size=5), st.integers(0, 4)), max_size=12),
)
def test_no_group_is_ever_older_than_the_bound_and_none_vanishes(lag: int, steps: list[tuple[list[int], int]]) -> None:
    buffer, made, seen = GroupBuffer(lag), 0, 0
    for version, (ages, count) in enumerate(steps):
        buffer.add([group(f"{made + k:06d}", max(version - age, 0)) for k, age in enumerate(ages)])
        made += len(ages)
        taken, stale = buffer.take(count, version)
        assert len(taken) <= count
        assert all(version - g.oldest_version <= lag for g in taken)
        assert all(version - g.oldest_version > lag for g in stale)
        seen += len(taken) + len(stale)
    assert seen + len(buffer) == made
