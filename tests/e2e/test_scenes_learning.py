"""The tiny observer learns to judge sentences about two images, and to describe one; with shuffled rewards it does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs import trained


def learned(config: str, folder: Path, *changes: str, seed: int = 0) -> tuple[float, float]:
    """Mean reward of greedy answers on the test split, before and after a run of a configuration of at most ten minutes."""
    evaluations, seconds = trained(config, folder, f"seed={seed}", *changes)
    rewards = [float(entry["reward/default"]) for entry in evaluations]
    print(f"{config} {changes}, seed {seed}: {rewards} in {seconds} s")
    assert seconds <= 600
    return rewards[0], rewards[-1]


@pytest.mark.acceptance
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0, 1])
def test_sentences_about_two_images_are_judged(seed: int, tmp_path: Path) -> None:
    before, after = learned("nlvr2_tiny", tmp_path, seed=seed)
    assert before <= 0.6
    assert after >= 0.85


@pytest.mark.acceptance
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [0, 1])
def test_captions_become_complete(seed: int, tmp_path: Path) -> None:
    before, after = learned("caption_tiny", tmp_path, seed=seed)
    assert after >= before + 0.3


@pytest.mark.acceptance
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("config", "gain"), [("nlvr2_tiny", 0.1), ("caption_tiny", 0.15)])
def test_shuffled_rewards_teach_nothing(config: str, gain: float, tmp_path: Path) -> None:
    before, after = learned(config, tmp_path, "algorithm.shuffle_rewards=true")
    assert after <= before + gain
