"""The driver's side of sampling: who has died is counted once, whoever notices. The calls of actors are played by futures."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from ray_support import DEAD, HANGS, RAY, Reference

from rl_vlm.config import PolicyConfig
from rl_vlm.rollout import actors
from rl_vlm.rollout import sampler as module
from rl_vlm.rollout.actors import ActorPool
from rl_vlm.rollout.rollouts import make_rollouts
from rl_vlm.rollout.sampler import Sampler
from rl_vlm.rollout.tasks import RolloutResult, RolloutTask

TASKS = [RolloutTask(f"g{k}", k, "train", k, k, 1, 1.0, 0) for k in range(4)]


class Runner:
    """An env runner; `outcomes` are what its next calls give, an exception or None for a result."""

    def __init__(self) -> None:
        self.outcomes: list[Exception | None] = []
        self.asked: list[tuple[str, int]] = []  # id and version of each task that was sent here
        self.running: list[Reference] = []
        self.killed = 0
        self.sample = SimpleNamespace(remote=self._sample)
        self.back = True
        self.ping = SimpleNamespace(remote=lambda: Reference(None if self.back else DEAD))

    def _outcome(self, result: Any) -> Reference:
        failed = self.outcomes.pop(0) if self.outcomes else None
        self.running.append(Reference(failed or result))
        return self.running[-1]

    def kill(self) -> None:
        self.killed += 1
        for reference in self.running:
            if reference.value is HANGS:
                reference.value = DEAD

    def _sample(self, tasks: list[RolloutTask]) -> Reference:
        self.asked += [(task.group_id, task.min_version) for task in tasks]
        return self._outcome(RolloutResult(lost={task.group_id: "played" for task in tasks}))


class Manager:
    """Two env runners; probing finds each back unless they `stay_down`."""

    def __init__(self, count: int) -> None:
        self.runners = {k + 1: Runner() for k in range(count)}

    def stay_down(self) -> None:
        for runner in self.runners.values():
            runner.back = False


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Manager:
    monkeypatch.setattr(module, "ray", RAY)
    monkeypatch.setattr(actors, "ray", RAY)
    return Manager(2)


def runners_of(manager: Manager) -> ActorPool:
    return ActorPool(manager.runners)


def sampler_of(manager: Manager) -> Sampler:
    """One call per runner."""
    return Sampler(runners_of(manager), sharded=True)


def finished(sampler: Sampler, timeout_s: float = 30) -> RolloutResult:
    sampler.give(TASKS, timeout_s)
    return sampler.finish()


def test_a_runner_that_dies_while_it_samples_loses_its_shard_to_another(manager: Manager) -> None:
    sampler = sampler_of(manager)
    manager.runners[1].outcomes = [DEAD]
    result = finished(sampler)
    assert result.dropped == {"runner_died": 1} and len(result.lost) == 4 and sampler.runners.restarts == 1
    assert finished(sampler).dropped == {} and sampler.runners.restarts == 1


@pytest.mark.parametrize("sharded", [True, False])
@pytest.mark.parametrize("late", [DEAD, RolloutResult(needs_restart=True)])
def test_a_late_answer_from_a_runners_earlier_life_says_nothing_about_its_health(
    manager: Manager, sharded: bool, late: Any
) -> None:
    runners = runners_of(manager)
    sampler = Sampler(runners, sharded)
    manager.runners[1].outcomes = [HANGS, HANGS]
    sampler.give(TASKS, 30)
    runners.lose(1)  # another call found that it died
    runners.probe()  # it is back
    for reference in manager.runners[1].running:
        reference.value = late
    manager.runners[1].outcomes = []
    result = sampler.finish()
    assert result.dropped == {"runner_died": 1} and runners.restarts == 1
    assert 1 in runners.healthy and manager.runners[1].killed == 0


# --- one call per group


def continuous_of(manager: Manager, places: int = 8) -> tuple[Sampler, ActorPool]:
    runners = runners_of(manager)
    return Sampler(runners, sharded=False, places=places), runners


def test_tasks_are_spread_evenly_and_each_result_is_given_once(manager: Manager) -> None:
    sampler, _ = continuous_of(manager)
    sampler.give(TASKS, 30, version=3)
    assert manager.runners[1].asked == [("g0", 3), ("g2", 3)] and manager.runners[2].asked == [("g1", 3), ("g3", 3)]
    assert len(sampler) == 4 and sampler.versions() == [3, 3, 3, 3]
    assert set(sampler.collect(3, 0).lost) == {"g0", "g1", "g2", "g3"}
    assert len(sampler) == 0 and sampler.collect(3, 0) == RolloutResult()


def test_the_groups_of_a_runner_that_dies_go_to_another_with_the_newest_version(manager: Manager) -> None:
    sampler, runners = continuous_of(manager)
    manager.runners[1].outcomes = [DEAD, DEAD]
    manager.stay_down()
    sampler.give(TASKS, 30, version=1)
    result = sampler.collect(2, 0)
    assert set(result.lost) == {"g1", "g3"} and result.dropped == {"runner_died": 1} and runners.restarts == 1
    result = sampler.collect(2, 0)
    assert set(result.lost) == {"g0", "g2"} and result.dropped == {}
    assert manager.runners[2].asked[2:] == [("g0", 2), ("g2", 2)]


def test_a_group_that_hangs_is_lost_and_its_neighbours_are_sent_anew(manager: Manager) -> None:
    sampler, runners = continuous_of(manager)
    manager.runners[1].outcomes = [HANGS, HANGS]
    sampler.give(TASKS, 0.0, version=0)
    result = sampler.collect(0, 0)
    assert result.lost["g0"] == "no result within 0 s" and len(result.lost) == 4
    assert result.dropped == {"group_timeout": 2} and manager.runners[1].killed == 1 and runners.restarts == 1


def test_the_deadline_of_a_group_begins_when_its_runner_has_a_place_for_it(manager: Manager) -> None:
    sampler, runners = continuous_of(manager, places=1)
    manager.runners[1].outcomes = [HANGS, HANGS]
    sampler.give(TASKS, 0.0, version=0)
    result = sampler.collect(0, 0)
    assert "g0" in result.lost and "g2" not in result.lost  # g2 waits behind g0
    assert result.dropped == {"group_timeout": 1} and runners.restarts == 1


def test_a_runner_is_not_restarted_for_a_group_that_waits_there(manager: Manager) -> None:
    """A group that was sent anew keeps its deadline, and may wait behind others."""
    sampler, runners = continuous_of(manager, places=1)
    manager.runners[1].outcomes = [HANGS, HANGS]
    manager.runners[2].outcomes = [HANGS, HANGS]
    sampler.give(TASKS, 30, version=0)
    sampler.collect(0, 0)
    waiting = next(ref for ref, call in sampler._open.items() if call.tasks[0].group_id == "g3")
    sampler._open[waiting] = replace(sampler._open[waiting], due=0.0)
    result = sampler.collect(0, 0)
    assert set(result.lost) == {"g3"} and runners.restarts == 0


def test_without_any_runner_sampling_ends_with_a_sentence(manager: Manager) -> None:
    sampler, runners = continuous_of(manager)
    sampler._grace_s = 0.0
    manager.stay_down()
    for number in manager.runners:
        runners.lose(number)
    with pytest.raises(module.SamplingError):
        sampler.give(TASKS, 30, version=0)
        sampler.collect(0, 0)


def test_a_stop_is_heard_while_all_runners_are_down(manager: Manager) -> None:
    """Their node was preempted in the middle of an evaluation, and another machine takes minutes to start."""
    sampler = sampler_of(manager)
    for runner in manager.runners.values():
        runner.outcomes = [DEAD]
    manager.stay_down()
    sampler.give(TASKS, 30)
    asked = iter([False, False, False])
    with pytest.raises(module.RoundAbandonedError):
        sampler.finish(lambda: next(asked, True))
    assert len(sampler) == 0


@pytest.mark.parametrize("autoscaling", [True, False])
def test_an_autoscaler_has_the_time_that_a_machine_takes_to_start(
    manager: Manager, monkeypatch: pytest.MonkeyPatch, autoscaling: bool
) -> None:
    monkeypatch.delenv("RL_VLM_AUTOSCALING", raising=False)
    if autoscaling:
        monkeypatch.setenv("RL_VLM_AUTOSCALING", "1")
    for lag in (0, 2):
        run = PolicyConfig.model_validate({"rollout": {"max_policy_lag": lag}, "serving": {"startup_timeout_s": 900.0}})
        rollouts = make_rollouts(runners_of(manager), SimpleNamespace(), run)  # type: ignore[arg-type]
        waits = [rollouts._sampler._grace_s, *([rollouts._continuous._grace_s] if lag else [])]
        assert set(waits) == {900.0 if autoscaling else 120.0}


def test_several_calls_that_one_death_ends_are_one_death(manager: Manager) -> None:
    runners = runners_of(manager)
    manager.runners[1].outcomes = [DEAD, DEAD]
    manager.stay_down()
    both = Sampler(runners, sharded=True), Sampler(runners, sharded=False)  # as an evaluation beside training
    both[0].give(TASKS, 30)
    both[1].give(TASKS, 30)
    assert [sampler.finish().dropped for sampler in both] == [{"runner_died": 1}, {}] and runners.restarts == 1


def test_a_round_that_finished_while_the_driver_was_busy_is_taken(manager: Manager) -> None:
    """Its deadline is long past when the driver looks: the results are there, and no runner hangs."""
    sampler = sampler_of(manager)
    result = finished(sampler, timeout_s=0.0)
    assert len(result.lost) == 4 and set(result.lost.values()) == {"played"}
    assert result.dropped == {} and sampler.runners.restarts == 0
