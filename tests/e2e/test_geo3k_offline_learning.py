"""The tiny geometer learns the third angle of a drawn triangle, with the scoring tool and without; with shuffled rewards it does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import trained


def learned(folder: Path, *changes: str, seed: int = 0) -> tuple[dict[str, float], dict[str, float]]:
    """Greedy accuracy on the test split with the tool (`default`) and without (`no_tool`), before and after a run."""
    evaluations, seconds = trained("geo3k_offline_tiny", folder, f"seed={seed}", *changes)
    before, after = (
        {name: float(entry[f"accuracy/{name}"]) for name in ("default", "no_tool")}
        for entry in (evaluations[0], evaluations[-1])
    )
    print(f"geo3k_offline_tiny {changes}, seed {seed}: {before} -> {after} in {seconds} s")
    assert seconds <= 600
    return before, after


@pytest.mark.acceptance
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0, 1])
def test_third_angles_are_found_with_the_tool_and_without(seed: int, tmp_path: Path) -> None:
    before, after = learned(tmp_path, seed=seed)
    assert before["default"] <= 0.4
    assert after["default"] >= 0.8
    assert after["no_tool"] >= before["no_tool"] + 0.2


@pytest.mark.acceptance
@pytest.mark.timeout(1200)
def test_shuffled_rewards_teach_nothing(tmp_path: Path) -> None:
    before, after = learned(tmp_path, "algorithm.shuffle_rewards=true")
    assert after["default"] <= before["default"] + 0.15
    assert after["no_tool"] <= before["no_tool"] + 0.15
