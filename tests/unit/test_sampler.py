"""The driver's side of sampling: who has died is counted once, whoever notices. The calls of actors are played by futures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, RayTaskError

from rl_vlm.rollout import sampler as module
from rl_vlm.rollout.sampler import RolloutSampler
from rl_vlm.rollout.tasks import RolloutResult, RolloutTask

TASKS = [RolloutTask(f"g{k}", k, "train", k, k, 1, 1.0, 0) for k in range(4)]
DEAD = ActorUnavailableError("The actor is restarting.", None)


class Reference:
    """A result that is there, or the exception that getting it raises; compared by identity, as Ray's are by id."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Runner:
    """An env runner; `outcomes` are what its next calls give, an exception or None for a result."""

    def __init__(self) -> None:
        self.outcomes: list[Exception | None] = []
        self.prepared: list[str] = []
        self.sample = SimpleNamespace(remote=self._sample)
        self.prepare = SimpleNamespace(remote=self._prepare)

    def _outcome(self, result: Any) -> Reference:
        failed = self.outcomes.pop(0) if self.outcomes else None
        return Reference(failed or result)

    def _sample(self, tasks: list[RolloutTask]) -> Reference:
        return self._outcome(RolloutResult(lost={task.group_id: "played" for task in tasks}))

    def _prepare(self, tasks: list[RolloutTask]) -> Reference:
        self.prepared += [task.group_id for task in tasks]
        return self._outcome(None)


class Manager:
    """RLlib's actor manager, as far as the sampler knows it: probing finds every runner back."""

    def __init__(self, count: int) -> None:
        self.runners = {k + 1: Runner() for k in range(count)}
        self.health = dict.fromkeys(self.runners, True)

    def actors(self) -> dict[int, Runner]:
        return self.runners

    def actor_ids(self) -> list[int]:
        return list(self.runners)

    def healthy_actor_ids(self) -> list[int]:
        return [k for k, healthy in self.health.items() if healthy]

    def set_actor_state(self, runner: int, healthy: bool) -> None:
        self.health[runner] = healthy

    def probe_unhealthy_actors(self, **_: Any) -> None:
        self.health = dict.fromkeys(self.runners, True)


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Manager:
    def get(ref: Reference, timeout: float) -> Any:
        if isinstance(ref.value, Exception):
            raise ref.value
        return ref.value

    played = SimpleNamespace(get=get, wait=lambda refs, **_: (list(refs), []), ObjectRef=Reference)
    monkeypatch.setattr(module, "ray", played)
    return Manager(2)


def sampler_of(manager: Manager) -> RolloutSampler:
    return RolloutSampler(SimpleNamespace(_worker_manager=manager), timeout_s=30)  # type: ignore[arg-type]


def dropped(sampler: RolloutSampler) -> dict[str, int]:
    return sampler.collect(sampler.start(TASKS))[1].dropped


def test_a_runner_that_dies_while_it_samples_loses_its_shard_to_another(manager: Manager) -> None:
    sampler = sampler_of(manager)
    manager.runners[1].outcomes = [DEAD]
    work = sampler.start(TASKS)
    _, result = sampler.collect(work)
    assert result.dropped == {"runner_died": 1} and len(result.lost) == 4 and sampler.restarts == 1
    assert dropped(sampler) == {} and sampler.restarts == 1


def test_a_runner_that_dies_while_it_prepares_and_is_back_is_counted(manager: Manager) -> None:
    sampler = sampler_of(manager)
    manager.runners[2].outcomes = [DEAD]
    sampler.prepare(TASKS)
    assert manager.runners[1].prepared == ["g0", "g2"] and manager.runners[2].prepared == ["g1", "g3"]
    assert dropped(sampler) == {"runner_died": 1} and sampler.restarts == 1


def test_a_death_that_rllib_finds_first_is_counted(manager: Manager) -> None:
    sampler = sampler_of(manager)
    manager.set_actor_state(1, healthy=False)
    assert dropped(sampler) == {"runner_died": 1} and sampler.restarts == 1


def test_several_calls_that_one_death_ends_are_one_death(manager: Manager) -> None:
    sampler = sampler_of(manager)
    manager.runners[1].outcomes = [DEAD, DEAD]
    first, second = sampler.start(TASKS), sampler.start(TASKS)  # as with a policy lag
    manager.probe_unhealthy_actors = lambda **_: None  # type: ignore[method-assign]
    both = [sampler.collect(work)[1].dropped for work in (first, second)]
    assert both == [{"runner_died": 1}, {}] and sampler.restarts == 1


def test_a_runner_that_cannot_prepare_has_not_died(manager: Manager) -> None:
    sampler = sampler_of(manager)
    manager.runners[1].outcomes = [RayTaskError("prepare", "traceback", ValueError("broken"))]
    sampler.prepare(TASKS)
    assert dropped(sampler) == {} and sampler.restarts == 0


def test_a_round_that_finished_while_the_driver_was_busy_is_taken(manager: Manager) -> None:
    """Its deadline is long past when the driver looks: the results are there, and no runner hangs."""
    sampler = RolloutSampler(SimpleNamespace(_worker_manager=manager), timeout_s=0.0)  # type: ignore[arg-type]
    _, result = sampler.collect(sampler.start(TASKS))
    assert len(result.lost) == 4 and set(result.lost.values()) == {"played"}
    assert result.dropped == {} and sampler.restarts == 0
