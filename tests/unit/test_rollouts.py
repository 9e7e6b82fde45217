"""Rounds, and groups ahead of the learner: every task has its own number and seed, nothing is lost, nothing too old is used."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from task_support import trajectory

from rl_vlm.config import PolicyConfig, parse_config
from rl_vlm.rollout.mixture import Mixture
from rl_vlm.rollout.rollouts import GroupBuffer, Rollouts, TooManyFailuresError
from rl_vlm.rollout.sampler import RoundAbandonedError
from rl_vlm.rollout.task_stream import TaskStream
from rl_vlm.rollout.tasks import RolloutResult, RolloutTask
from rl_vlm.types import TrajectoryGroup


def group(name: str, version: int = 0, rewards: Sequence[float] = (1.0,)) -> TrajectoryGroup:
    members = [trajectory(f"{name}:{k}", [(1, reward)], version=version) for k, reward in enumerate(rewards)]
    return TrajectoryGroup(name, 0, members)


def run_of(lag: int = 0, prompts: int = 3, refill: float = 0.0, late: str = "wait", **logging: Any) -> PolicyConfig:
    rollout = {"prompts_per_iteration": prompts, "max_policy_lag": lag, "late_groups": late}
    return parse_config({"rollout": rollout, "algorithm": {"max_refill": refill}, "logging": logging})


class InstantSampler:
    """Answers every task with one group of the version that it asks for; `lose` names tasks that are lost, `flat` those whose
    rewards are all equal."""

    def __init__(self) -> None:
        self.started: list[list[RolloutTask]] = []
        self.opened: list[list[RolloutTask]] = []
        self.lose: set[str] = set()
        self.flat: Callable[[str], bool] = lambda name: False

    def give(self, tasks: list[RolloutTask], timeout_s: float, version: int | None = None) -> None:
        self.started.append(tasks if version is None else [replace(task, min_version=version) for task in tasks])

    def open_ahead(self, tasks: list[RolloutTask]) -> None:
        self.opened.append(tasks)

    def finish(self, stop: Any) -> RolloutResult:
        tasks = self.started[-1]
        lost = {task.group_id: "lost" for task in tasks if task.group_id in self.lose}
        rewards = {task.group_id: (1.0, 1.0) if self.flat(task.group_id) else (0.0, 1.0) for task in tasks}
        found = [group(t.group_id, t.min_version, rewards[t.group_id]) for t in tasks if t.group_id not in lost]
        return RolloutResult(groups=found, lost=lost)


class RandomOrder:
    """Plays the runners: at every look some tasks are complete, in any order; some are lost, some sent anew to a newer version."""

    def __init__(self, seed: int = 0, slow: Callable[[str], bool] = lambda name: False) -> None:
        self.rng, self.slow = np.random.default_rng(seed), slow
        self.given: list[RolloutTask] = []
        self.running: list[RolloutTask] = []
        self.flat: Callable[[str], bool] = lambda name: False
        self.most_under_way = 0

    def __len__(self) -> int:
        return len(self.running)

    def versions(self) -> list[int]:
        return [task.min_version for task in self.running]

    def give(self, tasks: list[RolloutTask], timeout_s: float, version: int) -> None:
        self.given += tasks
        self.running += [replace(task, min_version=version) for task in tasks]
        self.most_under_way = max(self.most_under_way, len(self.running))

    def collect(self, version: int, wait_s: float) -> RolloutResult:
        result = RolloutResult()
        running, self.running = self.running, []
        for task in running:
            luck = self.rng.random()
            if luck < (0.02 if self.slow(task.group_id) else 0.3):
                rewards = (1.0, 1.0) if self.flat(task.group_id) else (0.0, 1.0)
                result.groups.append(group(task.group_id, task.min_version, rewards))
            elif luck > 0.98:
                result.lost[task.group_id] = "played"
            else:  # some die with their runner
                self.running.append(replace(task, min_version=version) if luck > 0.95 else task)
        return result

    def clear(self) -> None:
        self.running = []


def source_of(run: PolicyConfig, items: int | None = 1000, kind: type[Mixture] = Mixture) -> Mixture:
    return kind({"": 1.0}, {"": items}, run.seed, run.curriculum)


def rollouts_of(run: PolicyConfig, items: int | None = 100) -> tuple[Rollouts, InstantSampler]:
    sampler = InstantSampler()
    return Rollouts(sampler, TaskStream(source_of(run, items), run), run), sampler  # type: ignore[arg-type]


@pytest.mark.parametrize(("isolation", "at_once"), [("process", [2, 2, 1]), ("thread", [5])])
def test_an_evaluation_is_bounded_where_environments_are_processes(isolation: str, at_once: list[int]) -> None:
    run = parse_config({"env": {"isolation": isolation}, "evaluation": {"at_once": 2}})
    rollouts, sampler = rollouts_of(run)
    tasks = rollouts._stream.take(5)
    sampler.lose = {tasks[0].group_id}
    groups, _ = rollouts.evaluate(tasks, 10.0)
    assert [len(given) for given in sampler.started] == at_once
    assert [group.group_id for group in groups] == [task.group_id for task in tasks[1:]]
    assert rollouts.dropped == {"test_items": 1}


def test_lost_items_of_evaluations_end_no_training() -> None:
    rollouts, sampler = rollouts_of(parse_config({}))
    tasks = rollouts._stream.take(40)
    sampler.lose = {task.group_id for task in tasks}
    for _ in range(3):
        assert not rollouts.evaluate(tasks, 10.0)[0]
    assert len(rollouts.take_failures()) == 40 and rollouts.dropped == {"test_items": 120}


def continuous_of(run: PolicyConfig, played: RandomOrder) -> Rollouts:
    stream = TaskStream(source_of(run), run)
    return Rollouts(InstantSampler(), stream, run, played)  # type: ignore[arg-type]


def identity(task: RolloutTask) -> tuple[Any, ...]:
    return task.group_id, task.index, task.seed, task.sampling_seed


def test_rounds_have_numbers_and_seeds_of_their_own() -> None:
    run = run_of(trajectories_every=2)
    rollouts, sampler = rollouts_of(run)
    for update in range(6):
        rollouts.next_groups(update, iterations_left=5 - update)
        rollouts.open_next()
    tasks = [task for tasks in sampler.started for task in tasks]
    assert [int(task.group_id.split(":")[0]) for task in tasks] == [number for number in range(6) for _ in range(3)]
    assert len({task.sampling_seed for task in tasks}) == len({task.group_id for task in tasks}) == 18
    assert [tasks[0].record for tasks in sampler.started] == [True, False] * 3


def test_the_round_that_was_opened_ahead_asks_for_the_version_of_its_start() -> None:
    rollouts, sampler = rollouts_of(run_of())
    rollouts.next_groups(0, iterations_left=9)
    rollouts.open_next()
    rollouts.next_groups(7, iterations_left=8)
    assert [task.group_id for task in sampler.opened[0]] == [task.group_id for task in sampler.started[1]]
    assert {task.min_version for task in sampler.started[1]} == {7}


def test_what_was_under_way_comes_first_after_a_resume() -> None:
    run = run_of()
    rollouts, sampler = rollouts_of(run)
    rollouts.next_groups(0, iterations_left=9)
    rollouts.open_next()
    state = json.loads(json.dumps(rollouts.state()))
    whole = [task for tasks in sampler.started + sampler.opened for task in tasks]
    resumed, again = rollouts_of(run)
    resumed.restore(state, counts=True)
    for update in range(4):
        resumed.next_groups(1 + update, iterations_left=8 - update)
    seen = [task for tasks in again.started for task in tasks]
    # The learned round does not come again; what was being opened does, in order, then new items.
    assert list(map(identity, seen[: len(whole) - 3])) == list(map(identity, whole[3:]))
    uninterrupted, sampler = rollouts_of(run)
    for update in range(9):
        uninterrupted.next_groups(update, iterations_left=9 - update)
    expected = [identity(task) for tasks in sampler.started for task in tasks]
    assert list(map(identity, seen)) == expected[3 : 3 + len(seen)]
    assert resumed.trajectories == 15 * 2


# --- groups without a gradient


def mostly_flat(name: str) -> bool:
    """Seven of ten groups."""
    number, place = map(int, name.split(":"))
    return (7 * number + place) % 10 < 7


def test_groups_without_a_gradient_are_replaced_up_to_the_bound() -> None:
    run = run_of(prompts=10, refill=3.0)
    rollouts, sampler = rollouts_of(run)
    sampler.flat = mostly_flat
    for update in range(20):
        before, sampler.started = rollouts.dropped["no_gradient"], []
        taken = rollouts.next_groups(update, 19 - update)
        replaced = rollouts.dropped["no_gradient"] - before
        assert len(taken) == 10
        assert sum(map(len, sampler.started)) == 10 + replaced and replaced <= 30
        # All have a gradient unless the bound was reached.
        assert replaced == 30 or not any(np.ptp(g.rewards) == 0 for g in taken)
    sampled = rollouts.trajectories / 2 + rollouts.dropped["no_gradient"]
    assert sampled > 25 * 20 and rollouts.state()["tasks"]["open"] == []


def test_a_group_whose_rewards_only_rounding_tells_apart_is_replaced() -> None:
    rounded, told = group("rounded", 0, (0.1 + 0.2, 0.3)), group("told", 0, (0.3, 0.3001))
    rollouts, _ = rollouts_of(run_of(refill=3.0))
    assert [one.group_id for one in rollouts._add(RolloutResult(groups=[rounded, told]))] == ["rounded"]
    assert len(rollouts._buffer) == 1


def test_failures_in_a_row_stop_the_run_and_a_success_forgives() -> None:
    rollouts, _ = rollouts_of(parse_config({"rollout": {"max_consecutive_failures": 4}}))
    rollouts._add(RolloutResult(lost={"a": "x", "b": "y", "c": "z"}))
    rollouts._add(RolloutResult(groups=[group("d", 0)], lost={"e": "x"}))
    rollouts._add(RolloutResult(lost={"f": "x", "g": "x"}))
    with pytest.raises(TooManyFailuresError, match="the reason"):
        rollouts._add(RolloutResult(lost={"h": "x", "i": "the reason"}))


def test_a_run_that_loses_most_groups_stops_and_tells_why() -> None:
    rollouts, _ = rollouts_of(parse_config({}))
    for k in range(31):
        rollouts._add(RolloutResult(groups=[group(f"good{k}", 0)], lost={f"a{k}": "KeyError: 'x'", f"b{k}": "y"}))
    assert len(rollouts.take_failures()) == 62 and rollouts.take_failures() == {}
    with pytest.raises(TooManyFailuresError, match="64 of 96 groups"):
        rollouts._add(RolloutResult(groups=[group("good", 0)], lost={"a": "x", "b": "y"}))
    assert rollouts.take_failures() == {"a": "x", "b": "y"}


def test_a_run_whose_every_group_is_lost_ends_with_the_last_reason() -> None:
    first, second = ({f"{number:06}:{k:05}" for k in range(3)} for number in range(2))
    rollouts, sampler = rollouts_of(run_of())
    sampler.lose = first | second
    assert rollouts.next_groups(0, iterations_left=1) == []
    with pytest.raises(TooManyFailuresError, match="All groups of this run were lost, the last because of: lost"):
        rollouts.next_groups(0, iterations_left=0)
    rollouts, sampler = rollouts_of(run_of())
    sampler.lose = second
    assert len(rollouts.next_groups(0, iterations_left=1)) == 3
    assert rollouts.next_groups(1, iterations_left=0) == []


def test_refilling_continues_at_the_same_task_after_a_resume() -> None:
    """Refilled rounds draw from the middle of a numbered round; an interrupted run draws the same tasks as one that is not."""
    run = run_of(prompts=10, refill=2.0)
    whole, sampler = rollouts_of(run)
    sampler.flat = mostly_flat
    taken = [[g.group_id for g in whole.next_groups(update, 9)] for update in range(6)]
    first, sampler = rollouts_of(run)
    sampler.flat = mostly_flat
    assert [[g.group_id for g in first.next_groups(update, 9)] for update in range(3)] == taken[:3]
    second, sampler = rollouts_of(run)
    sampler.flat = mostly_flat
    second.restore(json.loads(json.dumps(first.state())), counts=True)
    assert [[g.group_id for g in second.next_groups(update, 9)] for update in range(3, 6)] == taken[3:]
    assert second.state() == whole.state()


# --- continuous sampling


@pytest.mark.parametrize("late", ["wait", "drop"])
@pytest.mark.parametrize("lag", [1, 2, 5])
@pytest.mark.parametrize("seed", range(4))
def test_no_group_is_too_old_and_no_item_is_lost_or_learned_from_twice(lag: int, late: str, seed: int) -> None:
    run = run_of(lag, prompts=4, late=late)
    played = RandomOrder(seed, slow=lambda name: name.endswith("1"))  # one of four takes fifteen times as long
    rollouts = continuous_of(run, played)
    learned: list[str] = []
    for version in range(40):
        taken = rollouts.next_groups(version, 39 - version)
        assert len(taken) == 4
        assert all(0 <= version - g.oldest_version <= lag for g in taken)
        learned += [g.group_id for g in taken]
    assert len(set(learned)) == len(learned) == 160
    assert played.most_under_way <= (lag + 1) * 4
    assert len({identity(task) for task in played.given}) == len(played.given)
    # Every task that was handed out was learned from, dropped, or lost; none is left at the end of the run.
    too_old, lost = rollouts.dropped["too_old"], rollouts.dropped["group_lost"]
    assert len(played.given) == 160 + too_old + lost and len(played) == 0
    assert rollouts.state()["tasks"]["open"] == []
    # Waiting drops none, also of the slow ones; dropping loses these.
    assert too_old == 0 if late == "wait" else (too_old > 0 or lag == 5)


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_arrival_changes_neither_the_batch_nor_the_counts(seed: int) -> None:
    def outcome(order: np.random.Generator) -> tuple[list[list[str]], dict[str, int], int]:
        played = RandomOrder(7)
        collect = played.collect

        def shuffled(version: int, wait_s: float) -> RolloutResult:
            result = collect(version, wait_s)
            result.groups = [result.groups[k] for k in order.permutation(len(result.groups))]
            return result

        played.collect = shuffled  # type: ignore[method-assign]
        played.flat = mostly_flat
        rollouts = continuous_of(run_of(lag=2, prompts=8, refill=10.0), played)
        batches = [[g.group_id for g in rollouts.next_groups(version, 9 - version)] for version in range(10)]
        return batches, dict(rollouts.dropped), rollouts.trajectories

    assert outcome(np.random.default_rng(seed)) == outcome(np.random.default_rng(seed + 100))


def test_groups_under_way_are_sampled_anew_after_a_resume() -> None:
    run, played = run_of(lag=2), RandomOrder(1)
    rollouts = continuous_of(run, played)
    learned = [g.group_id for version in range(5) for g in rollouts.next_groups(version, 20)]
    state = json.loads(json.dumps(rollouts.state()))
    again = RandomOrder(2)
    resumed = continuous_of(run, again)
    resumed.restore(state, counts=True)
    assert resumed.state() == state
    learned += [g.group_id for version in range(5, 10) for g in resumed.next_groups(version, 9 - version)]
    assert len(set(learned)) == len(learned) == 30
    first = {identity(task) for task in played.given if task.group_id not in learned[:15]}
    lost = rollouts.dropped["group_lost"]
    assert len(first & {identity(task) for task in again.given}) == len(first) - lost


@pytest.mark.parametrize("lag", [0, 2])
def test_each_group_that_was_learned_from_is_observed_once_over_a_resume(lag: int) -> None:
    """Groups that wait for the learner are sampled anew."""
    run, seen = run_of(lag=lag), Counter[str]()

    class Observing(Mixture):
        def observe(self, groups: Sequence[TrajectoryGroup]) -> None:
            seen.update(group.group_id for group in groups)

    def rollouts() -> Rollouts:
        stream = TaskStream(source_of(run, kind=Observing), run)
        if lag:
            return Rollouts(InstantSampler(), stream, run, RandomOrder())  # type: ignore[arg-type]
        return Rollouts(InstantSampler(), stream, run)  # type: ignore[arg-type]

    first, second = rollouts(), rollouts()
    learned = [group.group_id for k in range(4) for group in first.next_groups(k, iterations_left=20 - k)]
    assert not lag or len(first._buffer) > 0
    second.restore(json.loads(json.dumps(first.state())), counts=True)
    learned += [group.group_id for k in range(4, 8) for group in second.next_groups(k, iterations_left=20 - k)]
    assert {name: seen[name] for name in learned} == dict.fromkeys(learned, 1) and set(seen) == set(learned)


def test_lost_tasks_are_told_to_the_source_in_an_order_of_their_own() -> None:
    run, told = run_of(prompts=4), []

    class Noting(Mixture):
        def lose(self, tasks: Sequence[RolloutTask]) -> None:
            told.append([task.group_id for task in tasks])

    stream = TaskStream(source_of(run, kind=Noting), run)
    first, _, third, fourth = (task.group_id for task in stream.take(4))
    stream.lose({fourth: "", first: "", "unknown": ""})
    assert told == [[first, fourth]]
    assert [task["group_id"] for task in stream.state()["open"]] == ["000000:00001", third]


def test_restoring_forgets_what_is_under_way() -> None:
    """Learners were replaced: groups of the weights that are gone are not learned from."""
    played = RandomOrder()
    rollouts = continuous_of(run_of(lag=2), played)
    beginning = json.loads(json.dumps(rollouts.state()))
    rollouts.next_groups(0, 9)
    rollouts.restore(beginning, counts=False)
    assert len(played) == 0
    taken = rollouts.next_groups(5, 9)
    assert all(g.oldest_version >= 5 for g in taken)


def test_groups_without_a_gradient_are_replaced_while_others_run() -> None:
    played = RandomOrder()
    played.flat = mostly_flat
    rollouts = continuous_of(run_of(lag=1, prompts=10, refill=4.0), played)
    flat = 0
    for version in range(20):
        flat += sum(np.ptp(g.rewards) == 0 for g in rollouts.next_groups(version, 19 - version))
    assert rollouts.dropped["no_gradient"] > 300 and rollouts.trajectories == 400
    assert flat < 20  # only where the bound was reached
    assert rollouts.state()["tasks"]["open"] == []


def test_a_stop_request_ends_the_wait_for_groups() -> None:
    rollouts = continuous_of(run_of(lag=1), RandomOrder())
    rollouts.stop_requested = lambda: True
    with pytest.raises(RoundAbandonedError):
        rollouts.next_groups(0, 9)
    assert len(rollouts.state()["tasks"]["open"]) == 6


def test_the_buffer_gives_the_oldest_groups_first_and_keeps_the_rest() -> None:
    buffer = GroupBuffer(max_lag=2)
    buffer.add([group("b", 1), group("c", 1)])
    buffer.add([group("a", 1)])
    taken, stale = buffer.take(2, version=2)
    assert [g.group_id for g in taken] == ["a", "b"] and stale == [] and len(buffer) == 1
    taken, stale = buffer.take(2, version=4)
    assert taken == [] and [g.group_id for g in stale] == ["c"] and len(buffer) == 0
