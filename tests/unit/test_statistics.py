"""Statistics of evaluation: intervals as SciPy's, pass@k as counted out, and lost episodes count as wrong."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from scipy import stats

from rl_vlm.config import parse_config
from rl_vlm.evaluation.heldout import evaluation_tasks
from rl_vlm.evaluation.outcomes import outcomes_of_groups, summarize
from rl_vlm.numerics import are_equal, pass_at_k, wilson_interval
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.types import StopReason, Trajectory, TrajectoryGroup, TrajectoryStatus, Turn


@pytest.mark.parametrize(
    ("values", "equal"),
    [
        ([], True),
        ([5.0], True),
        ([0.1 + 0.2, 0.3], True),
        ([0.1 + 0.2 - 0.3, 0.0], True),
        ([1e9 * (0.1 + 0.2), 3e8], True),
        ([sum([0.1] * 300), 30.0], True),
        ([0.3, 0.3 + 1e-9], False),
        ([-1e-6, 0.0, 1e-6], False),
        ([-0.3, 0.3], False),
    ],
)
def test_numbers_are_equal_but_for_rounding(values: list[float], equal: bool) -> None:
    assert are_equal(np.array(values)) is equal


@pytest.mark.parametrize(("successes", "total"), [(0, 1), (1, 1), (0, 20), (20, 20), (7, 20), (256, 512), (1, 10_000)])
def test_the_wilson_interval_equals_that_of_scipy(successes: int, total: int) -> None:
    theirs = stats.binomtest(successes, total).proportion_ci(confidence_level=0.95, method="wilson")
    assert wilson_interval(successes, total) == pytest.approx((theirs.low, theirs.high), abs=1e-7)
    low, high = wilson_interval(successes, total)
    assert 0 <= low <= successes / total <= high <= 1


@pytest.mark.parametrize("samples", [1, 4, 7])
def test_pass_at_k_equals_counting_all_subsets(samples: int) -> None:
    correct = np.arange(samples + 1)
    for k in range(1, samples + 1):
        shares = []
        for right in correct:
            subsets = list(itertools.combinations([True] * right + [False] * (samples - right), k))
            shares.append(sum(any(subset) for subset in subsets) / len(subsets))
        assert pass_at_k(correct, samples, k) == pytest.approx(np.mean(shares))


# --- held-out evaluation


def episode(reward: float, **info: Any) -> Trajectory:
    mask = np.array([False, True])
    return Trajectory(
        "t", np.arange(2, dtype=np.int32), mask, np.where(mask, -1, 0).astype(np.float32),
        (Turn(1, 2, 0, StopReason.END_OF_TURN, reward),), TrajectoryStatus.COMPLETED, info=info,
    ).check()  # fmt: skip


def group(task: RolloutTask, episodes: list[Trajectory]) -> TrajectoryGroup:
    return TrajectoryGroup(task.group_id, task.index, episodes)


def test_the_environments_word_counts_before_the_reward() -> None:
    assert episode(0.0, correct=True).correct
    assert not episode(1.0, correct=False).correct
    assert episode(1.0).correct
    assert not episode(0.9).correct


def test_tasks_are_greedy_and_also_sampled_when_asked_for() -> None:
    run = parse_config(
        {
            "evaluation": {"num_items": 5, "samples": 4, "variants": {"a": {}, "b": {"turns": 2}}},
            "rollout": {"temperature": 0.7},
        }
    )
    tasks = evaluation_tasks(run, {"": 3}, min_version=9)
    assert len(tasks) == 2 * 2 * 3
    assert len({task.group_id for task in tasks}) == len(tasks)
    assert {(task.size, task.temperature) for task in tasks} == {(1, 0.0), (4, 0.7)}
    assert {task.split for task in tasks} == {"test"}
    assert {task.min_version for task in tasks} == {9}
    assert len(evaluation_tasks(run, {"": None}, min_version=0)) == 2 * 2 * 5
    again = evaluation_tasks(run, {"": 3}, min_version=9)
    assert [task.seed for task in again] == [task.seed for task in tasks]


def test_lost_episodes_count_as_wrong() -> None:
    run = parse_config({"evaluation": {"num_items": 4}})
    tasks = evaluation_tasks(run, {"": None}, 0)
    groups = [group(tasks[0], [episode(1.0)]), group(tasks[1], [episode(0.5)]), group(tasks[3], [episode(1.0)])]
    summary = summarize(run, tasks, outcomes_of_groups(run, tasks, groups))
    low, high = wilson_interval(2, 4)
    assert summary["accuracy/default"] == 0.5
    assert (summary["accuracy_low/default"], summary["accuracy_high/default"]) == (low, high)
    assert summary["reward/default"] == pytest.approx(2.5 / 4)
    assert summary["items/default"] == 4


def test_pass_at_k_is_taken_over_the_sampled_groups() -> None:
    run = parse_config({"evaluation": {"num_items": 2, "samples": 4}})
    tasks = evaluation_tasks(run, {"": None}, 0)
    sampled = [task for task in tasks if task.size == 4]
    answers = [episode(1.0), episode(0.0), episode(0.0), episode(0.0)]
    summary = summarize(
        run, tasks, outcomes_of_groups(run, tasks, [group(sampled[0], answers)])
    )  # the other one is lost
    assert summary["pass@1/default"] == pytest.approx((0.25 + 0) / 2)
    assert summary["pass@2/default"] == pytest.approx((0.5 + 0) / 2)
    assert summary["pass@4/default"] == pytest.approx((1.0 + 0) / 2)
    assert "pass@8/default" not in summary
    assert summary["accuracy/default"] == 0.0


def test_metrics_that_an_environment_declares_are_summarized_per_variant() -> None:
    run = parse_config({"evaluation": {"num_items": 3, "variants": {"a": {}, "b": {}}}})
    tasks = evaluation_tasks(run, {"": None}, 0)
    answered = [task for task in tasks if task.variant == "a"]
    groups = [group(task, [episode(1.0, distance=10.0 * k)]) for k, task in enumerate(answered)]
    summary = summarize(run, tasks, outcomes_of_groups(run, tasks, groups), {"": {"distance": (0.5,), "absent": ()}})
    assert {name: value for name, value in summary.items() if name.startswith("env/")} == {
        "env/distance/a": 10.0, "env/distance_p50/a": 10.0,
    }  # fmt: skip
