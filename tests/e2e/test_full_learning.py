"""Full fine-tuning is proven by learning, with a control that must fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import ROOT, TrainingProcess

from rl_vlm.models.loading import resolve_model

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(1800)]
CONFIG = ROOT / "configs" / "full_tiny.yaml"


def test_counting_is_learned_with_all_weights(tmp_path: Path) -> None:
    resolve_model("tiny")
    with TrainingProcess(tmp_path / "run", config=CONFIG) as run:
        assert run.wait(timeout=1700) == 0, run.output()[-3000:]
    result = run.result()
    print({name: result[name] for name in ("accuracy_before", "accuracy_after", "train_seconds")})
    assert result["accuracy_before"] <= 0.35
    assert result["accuracy_after"] >= 0.95


def test_shuffled_rewards_teach_all_weights_nothing(tmp_path: Path) -> None:
    resolve_model("tiny")
    with TrainingProcess(tmp_path / "run", "algorithm.shuffle_rewards=true", config=CONFIG) as run:
        assert run.wait(timeout=1700) == 0, run.output()[-3000:]
    print(run.result()["accuracy_after"])
    assert run.result()["accuracy_after"] <= 0.35


def test_a_killed_replica_costs_a_run_nothing(tmp_path: Path) -> None:
    resolve_model("tiny")
    short = ("algorithm.iterations=40", "evaluation.num_items=64")
    with TrainingProcess(tmp_path / "run", *short, config=CONFIG) as run:
        for iteration in (5, 15, 25):
            run.wait_for_iteration(iteration)
            run.kill("ray::ServeReplica")
        assert run.wait(timeout=1700) == 0, run.output()[-3000:]
    assert run.result()["policy_version"] == run.result()["iterations"] == 40
