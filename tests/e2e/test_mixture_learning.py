"""The tiny all-rounder learns four environments in one run; with shuffled rewards it learns none."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import trained

# By how much the held-out reward rises, at least.
GAINS = {"count": 0.5, "pairs": 0.3, "caption": 0.3, "zoom": 0.5}


@pytest.mark.acceptance
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("seed", [0, 1])
def test_each_of_four_environments_is_learned(seed: int, tmp_path: Path) -> None:
    evaluations, seconds = trained("mixture_tiny", tmp_path, f"seed={seed}", timeout=2300)
    found = {name: [round(entry[f"reward/{name}"], 3) for entry in evaluations] for name in GAINS}
    print(f"seed {seed}: {found} in {seconds} s")
    assert all(rewards[-1] >= rewards[0] + GAINS[name] for name, rewards in found.items()), found


@pytest.mark.acceptance
@pytest.mark.timeout(2400)
def test_shuffled_rewards_teach_none_of_them(tmp_path: Path) -> None:
    evaluations, _ = trained("mixture_tiny", tmp_path, "algorithm.shuffle_rewards=true", timeout=2300)
    for name in GAINS:
        assert evaluations[-1][f"reward/{name}"] <= evaluations[0][f"reward/{name}"] + 0.15
