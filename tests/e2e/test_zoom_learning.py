"""The tiny inspector learns to look closer where it has to and to answer what it sees; with shuffled rewards it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from runs import trained

pytestmark = pytest.mark.acceptance


def learned(folder: Path, *changes: str) -> tuple[dict[str, Any], dict[str, Any], float]:
    """The first and the last evaluation (greedy, test split), and the seconds of training."""
    evaluations, seconds = trained("zoom_tiny", folder, *changes)
    for name in ("accuracy", "reward", "env/calls_easy", "env/calls_hard"):
        print(f"{changes} {name}: {[round(entry[f'{name}/default'], 3) for entry in evaluations]}")
    print(f"{seconds:.0f} s")
    return evaluations[0], evaluations[-1], seconds


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_policy_looks_closer_where_it_has_to(seed: int, tmp_path: Path) -> None:
    before, after, seconds = learned(tmp_path, f"seed={seed}")
    assert before["accuracy/default"] <= 0.4
    assert after["accuracy/default"] >= 0.8
    assert after["env/calls_hard/default"] >= 0.9
    assert after["env/calls_easy/default"] <= 0.2
    assert seconds <= 600


@pytest.mark.timeout(1200)
def test_shuffled_rewards_teach_nothing(tmp_path: Path) -> None:
    before, after, _ = learned(tmp_path, "algorithm.shuffle_rewards=true")
    assert after["accuracy/default"] <= max(before["accuracy/default"], 0.2) + 0.15
