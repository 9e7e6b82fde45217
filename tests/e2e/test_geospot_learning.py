"""The tiny model learns where the places of the world are, on two seeds; with shuffled rewards it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runs import trained

pytestmark = pytest.mark.acceptance


def learned(folder: Path, *changes: str) -> tuple[dict[str, Any], dict[str, Any], float]:
    """The first and the last evaluation, and the seconds of training."""
    evaluations, seconds = trained("geospot_tiny", folder, *changes)
    return evaluations[0], evaluations[-1], seconds


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_median_distance_is_halved_within_ten_minutes(seed: int, tmp_path: Path) -> None:
    before, after, seconds = learned(tmp_path, f"seed={seed}")
    medians = [entry["env/distance_km_p50/default"] for entry in (before, after)]
    rewards = [entry["reward/default"] for entry in (before, after)]
    print(f"seed {seed}: median {medians} km, reward {rewards}, {seconds} s")
    assert medians[1] <= medians[0] / 2
    assert rewards[1] >= rewards[0] + 0.25
    assert after["env/format_ok/default"] >= 0.98
    assert seconds <= 600


@pytest.mark.timeout(1200)
def test_shuffled_rewards_teach_nothing(tmp_path: Path) -> None:
    before, after, _ = learned(tmp_path, "algorithm.shuffle_rewards=true")
    assert after["reward/default"] <= before["reward/default"] + 0.1
