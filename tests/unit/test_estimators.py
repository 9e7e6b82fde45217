"""Group-relative advantages: by hand, against TRL's formula, and exactly zero where nothing can be learned."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_vlm.learning.estimators import group_advantages


def test_advantages_by_hand() -> None:
    rewards = np.array([1.0, 0.0, 0.0, 1.0])
    assert group_advantages(rewards, "none").tolist() == [0.5, -0.5, -0.5, 0.5]
    # The unbiased standard deviation is sqrt(4 · 0.25 / 3).
    expected = 0.5 / (np.sqrt(1 / 3) + 1e-6)
    assert group_advantages(rewards, "std").tolist() == pytest.approx(
        [expected, -expected, -expected, expected], rel=1e-12
    )
    assert group_advantages(rewards, "none", scale=3.0).tolist() == [1.5, -1.5, -1.5, 1.5]


@pytest.mark.parametrize("normalization", ["std", "none"])
@pytest.mark.parametrize("reward", [0.0, 0.1, 0.2, 1.0, -0.3, 1e9 / 3, 1e-300])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 33])
def test_equal_rewards_give_exactly_zero(normalization: str, reward: float, size: int) -> None:
    advantages = group_advantages(np.full(size, reward), normalization)  # type: ignore[arg-type]
    assert advantages.tolist() == [0.0] * size


def test_the_mean_of_equal_rewards_is_not_always_that_reward() -> None:
    """Why the rule above is said outright in the code."""
    assert any(np.full(size, 0.1).mean() != 0.1 for size in range(2, 40))


def test_a_group_of_one_has_nothing_to_compare_with() -> None:
    assert group_advantages(np.array([5.0])).tolist() == [0.0]


@pytest.mark.parametrize("scale_rewards", ["group", "none"])
def test_advantages_equal_those_of_trl(scale_rewards: str) -> None:
    """GRPOTrainer subtracts the group's mean and divides by its unbiased standard deviation plus 1e-4."""
    rng = np.random.default_rng(0)
    for size in (2, 4, 8):
        rewards = rng.choice([0.0, 0.2, 0.5, 1.0], size)
        grouped = torch.tensor(rewards, dtype=torch.float64)
        theirs = grouped - grouped.mean()
        if scale_rewards == "group":
            theirs = theirs / (grouped.std() + 1e-4)
        ours = group_advantages(rewards, "std" if scale_rewards == "group" else "none", eps=1e-4)
        assert ours.tolist() == pytest.approx(theirs.tolist(), abs=1e-12)


@settings(max_examples=100, deadline=None)
@given(rewards=st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=16), shift=st.sampled_from([-4.0, 0.5, 128.0]))
def test_advantages_sum_to_zero_keep_the_order_and_ignore_a_shift(rewards: list[float], shift: float) -> None:
    values = np.array(rewards)
    for normalization in ("std", "none"):
        advantages = group_advantages(values, normalization)  # type: ignore[arg-type]
        assert advantages.dtype == np.float64
        assert abs(advantages.sum()) <= 1e-9 * max(np.abs(advantages).sum(), 1)
        order = np.argsort(values, kind="stable")
        assert np.all(np.diff(advantages[order]) >= 0)
        moved = group_advantages(values + shift, normalization)  # type: ignore[arg-type]
        # Only where the shift itself loses no digits can the result be the same.
        if np.array_equal((values + shift) - shift, values):
            assert np.allclose(moved, advantages, rtol=1e-6, atol=1e-6)
