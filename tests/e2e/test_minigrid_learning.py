"""The tiny roamer learns to reach MiniGrid's goal by words, over several turns; with shuffled rewards it does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import trained


def learned(folder: Path, *changes: str) -> tuple[float, float, float]:
    """Greedy success on starts of the test split before and after a run of at most ten minutes, and the mean turns after it."""
    evaluations, seconds = trained("minigrid_tiny", folder, *changes)
    figures = [(entry["reward/default"], entry["turns/default"]) for entry in evaluations]
    print(f"minigrid {changes}: (success, turns) {figures} in {seconds} s")
    assert seconds <= 600
    return figures[0][0], *figures[-1]


@pytest.mark.acceptance
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_goal_is_reached_by_words(seed: int, tmp_path: Path) -> None:
    before, after, turns = learned(tmp_path, f"seed={seed}")
    assert before <= 0.3
    assert after >= 0.8
    assert turns >= 4  # shortest ways take 4.7 on average


@pytest.mark.acceptance
@pytest.mark.timeout(1200)
def test_shuffled_rewards_teach_nothing(tmp_path: Path) -> None:
    before, after, _ = learned(tmp_path, "algorithm.shuffle_rewards=true")
    assert max(before, after) <= 0.4
