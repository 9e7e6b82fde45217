"""The driver's side of collecting steps and evaluating: env runners that die are asked again. Their calls are played."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayTaskError
from ray_support import DEAD, HANGS, RAY, Reference

from rl_vlm.preference import env_runner as module
from rl_vlm.preference.collector import CollectionError, EpisodeResult
from rl_vlm.preference.env_runner import ControlSampler

SLOW = ValueError("the result is fetched in more than one call's time")


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
        failure = self.failures.pop(0) if self.failures else None
        return Reference(played, slow_fetches=2) if failure is SLOW else Reference(failure or played)

    def kill(self) -> None:
        self.killed += 1


@pytest.fixture
def runners(monkeypatch: pytest.MonkeyPatch) -> dict[int, Runner]:
    monkeypatch.setattr(module, "ray", RAY)
    monkeypatch.setattr("rl_vlm.preference.env_runner.time.sleep", lambda _: None)
    return {1: Runner(), 2: Runner()}


def sampler(runners: dict[int, Runner]) -> ControlSampler:
    manager = SimpleNamespace(actors=lambda: runners, actor_ids=lambda: list(runners))
    group = SimpleNamespace(local_env_runner=None, num_remote_env_runners=lambda: len(runners), _worker_manager=manager)
    return ControlSampler(group, 30)


def seeds_of(results: list[EpisodeResult]) -> list[int]:
    return [result.seed for result in results]


def test_a_runner_that_dies_in_an_evaluation_plays_its_episodes_again(runners: dict[int, Runner]) -> None:
    one = sampler(runners)
    runners[1].failures = [DEAD, DEAD]
    assert seeds_of(one.evaluate(None, [5, 6, 7], 2, timeout_s=30)) == [5, 6, 7]  # type: ignore[arg-type]
    assert runners[1].asked == [([5, 7], 1)] * 3 and runners[2].asked == [([6], 1)]
    assert one.restarts == 1  # one death, however many calls it cost


def test_a_result_that_is_slow_to_fetch_is_not_made_again(runners: dict[int, Runner]) -> None:
    runners[1].failures = [SLOW]
    assert seeds_of(sampler(runners).evaluate(None, [5, 6], 0, timeout_s=30)) == [5, 6]  # type: ignore[arg-type]
    assert [len(runner.asked) for runner in runners.values()] == [1, 1]


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


def test_an_environment_that_fails_in_an_evaluation_is_named(runners: dict[int, Runner]) -> None:
    runners[1].failures = [RayTaskError("evaluate", "traceback", ValueError("the arm is stuck"))]
    with pytest.raises(CollectionError):
        sampler(runners).evaluate(None, [5, 6], 0, timeout_s=30)  # type: ignore[arg-type]
