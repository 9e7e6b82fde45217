"""Learning is proven by learning: three seeds, and a control that must fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import TrainingProcess

from rl_vlm.models.loading import resolve_model

pytestmark = pytest.mark.acceptance


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_counting_is_learned_within_five_minutes(seed: int, tmp_path: Path) -> None:
    resolve_model("tiny")
    with TrainingProcess(tmp_path / "run", f"seed={seed}") as run:
        assert run.wait() == 0, run.output()[-3000:]
    result = run.result()
    assert result["accuracy_before"] <= 0.35
    assert result["accuracy_after"] >= 0.90
    assert result["train_seconds"] <= 300
    assert min(result["requests_by_replica"].values()) >= 0.25 * sum(result["requests_by_replica"].values())


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_shuffled_rewards_teach_nothing(seed: int, tmp_path: Path) -> None:
    resolve_model("tiny")
    with TrainingProcess(tmp_path / "run", f"seed={seed}", "algorithm.shuffle_rewards=true") as run:
        assert run.wait() == 0, run.output()[-3000:]
    assert run.result()["accuracy_after"] <= 0.35


def test_two_turns_are_learned(tmp_path: Path) -> None:
    resolve_model("tiny")
    arguments = ("env.kwargs={task: count, turns: 2}", "rollout.max_turns=2", "algorithm.iterations=250")
    with TrainingProcess(tmp_path / "run", *arguments) as run:
        assert run.wait() == 0, run.output()[-3000:]
    assert run.result()["accuracy_after"] >= 0.90


def test_sampling_may_overlap_learning(tmp_path: Path) -> None:
    resolve_model("tiny")
    with TrainingProcess(tmp_path / "run", "rollout.max_policy_lag=1") as run:
        assert run.wait() == 0, run.output()[-3000:]
    result = run.result()
    assert result["accuracy_after"] >= 0.90
    assert "too_old" not in result["dropped"]


def test_two_runs_fit_on_one_machine(tmp_path: Path) -> None:
    resolve_model("tiny")
    short = ("algorithm.iterations=30", "evaluation.num_items=64")
    with TrainingProcess(tmp_path / "a", *short) as one, TrainingProcess(tmp_path / "b", *short, "seed=1") as two:
        assert one.wait() == 0, one.output()[-3000:]
        assert two.wait() == 0, two.output()[-3000:]
    assert one.result()["iterations"] == two.result()["iterations"] == 30
