"""PPO with either critic learns to count, on three seeds; with shuffled rewards it does not."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import mean

import pytest
from runs import ROOT, TrainingProcess

from rl_vlm.models.loading import resolve_model

pytestmark = pytest.mark.acceptance
CONFIGS = ["ppo_tiny", "ppo_critic_adapter_tiny"]


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


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("config", CONFIGS)
def test_shuffled_rewards_teach_nothing(config: str, tmp_path: Path) -> None:
    resolve_model("tiny")
    changes = ("algorithm.shuffle_rewards=true",)
    with TrainingProcess(tmp_path / "run", *changes, config=ROOT / f"configs/{config}.yaml") as run:
        assert run.wait(timeout=1100) == 0, run.output()[-3000:]
    assert run.result()["accuracy_after"] <= 0.35
