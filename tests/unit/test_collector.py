"""Collecting and evaluating: what is stepped is what is recorded, and a saved collector goes on as if nothing had happened."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray_support import DEAD, HANGS, RAY, Reference

from rl_vlm.control_envs.cartpole import ContinuousCartPole
from rl_vlm.preference import env_runner as module
from rl_vlm.preference.collector import CollectionError, Collector, NumpyActor, StepBatch
from rl_vlm.preference.env_runner import ControlSampler
from rl_vlm.preference.evaluation import EpisodeResult, evaluate
from rl_vlm.rollout import actors
from rl_vlm.rollout.actors import ActorPool


def actor(seed: int = 0) -> NumpyActor:
    rng = np.random.default_rng(seed)
    shapes = [(8, 4), (2, 8)]
    return NumpyActor([(rng.standard_normal(s).astype(np.float32), np.zeros(s[0])) for s in shapes], (-5.0, 2.0))


def collector(**options: object) -> Collector:
    settings = {"seed": 5, "frames": False} | options
    return Collector(lambda: ContinuousCartPole(horizon=10, image_size=32), **settings)  # type: ignore[arg-type]


def same(one: StepBatch, other: StepBatch) -> bool:
    return all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("observations", "actions", "next_observations", "true_rewards", "episodes", "times", "truncated")
    )


def test_steps_are_recorded_in_order_and_episodes_follow_each_other() -> None:
    batch = collector(env=1, num_envs=2, frames=True).collect(actor(), 25)
    assert len(batch) == 25 and batch.frames is not None and batch.frames.shape == (25, 32, 32, 3)
    assert batch.times.tolist() == [k % 10 for k in range(25)]
    assert batch.episodes.tolist() == [1 + 2 * (k // 10) for k in range(25)]
    assert batch.truncated.tolist() == [k % 10 == 9 for k in range(25)]
    inside = np.flatnonzero(~batch.truncated)[:-1]
    assert np.array_equal(batch.next_observations[inside], batch.observations[inside + 1])
    degrees = np.degrees(np.abs(batch.next_observations[:, 2]))
    assert batch.true_rewards == pytest.approx(-degrees, abs=1e-4)
    assert np.array_equal(batch.successes, batch.truncated & (degrees < 5))


def test_random_actions_fill_the_whole_range() -> None:
    actions = collector().collect(None, 2000).actions
    assert actions.min() < -0.99 and actions.max() > 0.99 and abs(actions.mean()) < 0.05


def test_the_policy_is_sampled_with_its_own_deviation() -> None:
    layers = [(np.zeros((2, 4), np.float32), np.array([0.3, 0.0], np.float32))]  # mean .3, log std -1.5
    actions = collector().collect(NumpyActor(layers, (-5.0, 2.0)), 4000).actions
    before = np.arctanh(actions)
    assert before.mean() == pytest.approx(0.3, abs=0.02) and before.std() == pytest.approx(np.exp(-1.5), rel=0.05)


@pytest.mark.parametrize("first", [0, 3, 10, 17])
def test_a_restored_collector_goes_on_exactly(first: int) -> None:
    straight = collector()
    begun = straight.collect(None, first) if first else None
    state = json.loads(json.dumps(straight.state()))
    restored = collector()
    restored.load(state)
    assert begun is None or len(begun) == first
    assert same(straight.collect(actor(), 15), restored.collect(actor(), 15))


def test_a_new_process_continues_the_numbers_of_episodes() -> None:
    batch = collector(env=2, num_envs=4).collect(None, 12, first_episode=7)
    assert sorted(set(batch.episodes.tolist())) == [7 * 4 + 2, 8 * 4 + 2]


def test_the_same_seeds_give_the_same_episodes_and_the_first_are_filmed() -> None:
    def make() -> ContinuousCartPole:
        return ContinuousCartPole(horizon=12, image_size=32)

    seeds = [11, 12, 13, 14, 15]
    one_run = evaluate(make(), actor(), seeds, film=2)
    again = evaluate(make(), actor(), seeds)
    for one, other in zip(one_run, again, strict=True):
        assert one.seed == other.seed and one.length == other.length == 12
        assert one.true_return == pytest.approx(other.true_return, rel=1e-5)
    assert [result.frames is not None for result in one_run] == [True, True, False, False, False]
    assert one_run[0].frames is not None and one_run[0].frames.shape == (12, 32, 32, 3)
    assert len({round(result.true_return, 3) for result in one_run}) == 5


def test_an_evaluation_episode_may_end_when_it_succeeds() -> None:
    class Soon(ContinuousCartPole):
        def step(self, action: np.ndarray) -> object:  # type: ignore[override]
            observation, reward, _, truncated, info = super().step(action)
            return observation, reward, False, truncated, {**info, "success": self._steps in (4, 5)}

    def make() -> ContinuousCartPole:
        return Soon(horizon=10, image_size=32)

    for result in evaluate(make(), actor(), [1, 2, 3], end_on_success=True):
        assert (result.length, result.success_best, result.success_last) == (4, 1.0, 1.0)
    for result in evaluate(make(), actor(), [1, 2, 3]):
        assert (result.length, result.success_best, result.success_last) == (10, 1.0, 0.0)


# --- The driver's side of collecting steps and evaluating: env runners that die are asked again. Their calls are played


class Runner:
    """An env runner; `failures` are what its next calls give in place of a result."""

    def __init__(self) -> None:
        self.failures: list[Exception] = []
        self.asked: list[tuple[list[int], int]] = []  # seeds and pictures of each call
        self.killed = 0
        self.evaluate = SimpleNamespace(remote=self._evaluate)

    def _evaluate(self, actor: Any, seeds: Sequence[int], film: int) -> Any:
        self.asked.append((list(seeds), film))
        played = [EpisodeResult(seed, 1.0, 1, 1.0, 1.0) for seed in seeds]
        return Reference(self.failures.pop(0) if self.failures else played)

    def kill(self) -> None:
        self.killed += 1


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> dict[int, Runner]:
    monkeypatch.setattr(module, "ray", RAY)
    monkeypatch.setattr(actors, "ray", RAY)
    monkeypatch.setattr(actors, "_AGAIN_S", 0.0)
    return {1: Runner(), 2: Runner()}


def sampler(runners: dict[int, Runner]) -> ControlSampler:
    return ControlSampler(ActorPool(runners), None, 30)


def seeds_of(results: list[EpisodeResult]) -> list[int]:
    return [result.seed for result in results]


def test_a_runner_that_dies_in_an_evaluation_plays_its_episodes_again(runners: dict[int, Runner]) -> None:
    one = sampler(runners)
    runners[1].failures = [DEAD, DEAD]
    assert seeds_of(one.evaluate(None, [5, 6, 7], 2, timeout_s=30)) == [5, 6, 7]  # type: ignore[arg-type]
    assert runners[1].asked == [([5, 7], 1)] * 3 and runners[2].asked == [([6], 1)]
    assert one.restarts == 1  # one death, however many calls it cost


@pytest.mark.parametrize(("film", "filmed"), [(0, [0, 0]), (1, [1, 0]), (2, [1, 1]), (4, [2, 2]), (9, [5, 4])])
def test_the_first_episodes_are_filmed_whoever_plays_them(
    runners: dict[int, Runner], film: int, filmed: list[int]
) -> None:
    sampler(runners).evaluate(None, range(5), film, timeout_s=30)  # type: ignore[arg-type]
    assert [runner.asked[0][1] for runner in runners.values()] == filmed


def test_an_evaluation_that_hangs_ends_at_its_deadline(runners: dict[int, Runner]) -> None:
    runners[2].failures = [HANGS]
    with pytest.raises(CollectionError):
        sampler(runners).evaluate(None, [5, 6], 0, timeout_s=0)  # type: ignore[arg-type]
    assert [runner.killed for runner in runners.values()] == [0, 1]
