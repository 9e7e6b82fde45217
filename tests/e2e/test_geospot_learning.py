"""The tiny model learns where the places of the world are, on two seeds; with shuffled rewards it does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from runs import ROOT, TrainingProcess

from rl_vlm.models.loading import resolve_model

pytestmark = pytest.mark.acceptance

CONFIG = ROOT / "configs/geospot_tiny.yaml"


def train(folder: Path, *changes: str) -> tuple[dict[str, Any], dict[str, Any], float]:
    """The first and the last evaluation, and the seconds of training."""
    resolve_model("tiny-geospot")
    with TrainingProcess(folder, *changes, config=CONFIG) as run:
        assert run.wait(timeout=1100) == 0, run.output()[-3000:]
    evaluations = [json.loads(line) for line in (run.run_dir / "eval.jsonl").read_text().splitlines()]
    return evaluations[0], evaluations[-1], run.result()["train_seconds"]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_median_distance_is_halved_within_ten_minutes(seed: int, tmp_path: Path) -> None:
    before, after, seconds = train(tmp_path / "run", f"seed={seed}")
    medians = [entry["env/distance_km_p50/default"] for entry in (before, after)]
    rewards = [entry["reward/default"] for entry in (before, after)]
    print(f"seed {seed}: median {medians} km, reward {rewards}, {seconds} s")
    assert medians[1] <= medians[0] / 2
    assert rewards[1] >= rewards[0] + 0.25
    assert after["env/format_ok/default"] >= 0.98
    assert seconds <= 600


@pytest.mark.timeout(1200)
def test_shuffled_rewards_teach_nothing(tmp_path: Path) -> None:
    before, after, _ = train(tmp_path / "run", "algorithm.shuffle_rewards=true")
    assert after["reward/default"] <= before["reward/default"] + 0.1
