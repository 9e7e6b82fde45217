"""Collecting and evaluating: what is stepped is what is recorded, and a saved collector goes on as if nothing had happened."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rl_vlm.control_envs.cartpole import ContinuousCartPole
from rl_vlm.preference.collector import Collector, Evaluator, NumpyActor, StepBatch


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
    one_run = Evaluator(make).run(actor(), seeds, film=2)
    again = Evaluator(make).run(actor(), seeds)
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

    for result in Evaluator(make, end_on_success=True).run(actor(), [1, 2, 3]):
        assert (result.length, result.success_best, result.success_last) == (4, 1.0, 1.0)
    for result in Evaluator(make).run(actor(), [1, 2, 3]):
        assert (result.length, result.success_best, result.success_last) == (10, 1.0, 0.0)
