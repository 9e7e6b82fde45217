"""PPO with either critic learns to count, on three seeds; with shuffled rewards it does not."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import mean

import pytest
from runs import ROOT, TrainingProcess

from rl_vlm.models.loading import resolve_model
from rl_vlm.ownership import files_in, run_files

CONFIGS = ["ppo_tiny", "ppo_critic_adapter_tiny"]


def test_ppo_runs_with_everything_that_it_has(tmp_path: Path) -> None:
    """A few iterations: the critic's adapter, its warm-up, a penalty in the reward, averaged weights, a learner actor."""
    resolve_model("tiny")
    changes = (
        "algorithm.iterations=6", "evaluation.num_items=64", "critic.warmup_iterations=1", "learner.num_learners=1",
        "algorithm.kl_in=reward", "algorithm.kl_target=0.02", "learner.ema_decay=0.9", "evaluation.weights=ema",
    )  # fmt: skip
    with TrainingProcess(tmp_path / "run", *changes, config=ROOT / "configs/ppo_critic_adapter_tiny.yaml") as run:
        assert run.wait() == 0, run.output()[-3000:]
        assert run.survivors() == []
    rows = list(csv.DictReader((run.run_dir / "progress.csv").open()))
    assert len(rows) == 6
    assert float(rows[0]["policy/ratio_max"]) == 0 < float(rows[1]["policy/ratio_max"])  # the warm-up
    assert float(rows[0]["policy/kl_coef"]) > 0
    assert all(0 < float(row["value/loss"]) < 10 for row in rows)
    weights = [(run.run_dir / f"{name}/adapter_model.safetensors").read_bytes() for name in ("adapter", "adapter-ema")]
    assert weights[0] != weights[1]
    assert run_files(run.run_dir) == files_in(run.run_dir)


@pytest.mark.acceptance
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("config", CONFIGS)
def test_counting_is_learned_and_the_critic_explains_the_returns(config: str, seed: int, tmp_path: Path) -> None:
    resolve_model("tiny")
    with TrainingProcess(tmp_path / "run", f"seed={seed}", config=ROOT / f"configs/{config}.yaml") as run:
        assert run.wait(timeout=1100) == 0, run.output()[-3000:]
    result = run.result()
    rows = list(csv.DictReader((run.run_dir / "progress.csv").open()))
    explained = mean(float(row["value/explained_variance"]) for row in rows[-20:])
    print(f"{config}, seed {seed}: {result['accuracy_after']}, {result['train_seconds']} s, explained {explained:.2f}")
    assert result["accuracy_before"] <= 0.35
    assert result["accuracy_after"] >= 0.90
    assert result["train_seconds"] <= 300
    assert explained >= 0.5


@pytest.mark.acceptance
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("config", CONFIGS)
def test_shuffled_rewards_teach_nothing(config: str, tmp_path: Path) -> None:
    resolve_model("tiny")
    changes = ("algorithm.shuffle_rewards=true",)
    with TrainingProcess(tmp_path / "run", *changes, config=ROOT / f"configs/{config}.yaml") as run:
        assert run.wait(timeout=1100) == 0, run.output()[-3000:]
    assert run.result()["accuracy_after"] <= 0.35
