"""examples/one_process.py: the loop in one process trains as its page says."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from runs import ROOT, environment


def outcome(*overrides: str, timeout_s: float) -> tuple[list[float], list[float]]:
    """Held-out accuracy before and after training, and the mean rewards that were printed."""
    command = [sys.executable, str(ROOT / "examples/one_process.py"), *overrides]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=timeout_s, check=True)
    accuracy = re.findall(r"held-out accuracy \w+ training: ([\d.]+)", done.stdout)
    rewards = re.findall(r"iteration \d+: mean reward ([\d.]+)", done.stdout)
    return [float(value) for value in accuracy], [float(value) for value in rewards]


@pytest.mark.timeout(300)
def test_the_example_samples_learns_and_publishes() -> None:
    few = ("algorithm.iterations=10", "rollout.prompts_per_iteration=4", "evaluation.num_items=16")
    accuracy, rewards = outcome(*few, timeout_s=280)
    assert len(accuracy) == 2 and len(rewards) == 1


@pytest.mark.acceptance
@pytest.mark.timeout(900)
def test_the_reward_of_the_example_rises() -> None:
    accuracy, rewards = outcome("algorithm.iterations=100", timeout_s=880)
    assert accuracy[0] <= 0.35 and accuracy[1] >= 0.9
    assert rewards[-1] >= rewards[0] + 0.3
