"""Group-relative advantages: by hand, against TRL's formula, and exactly zero where nothing can be learned."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from core_support import plan_update
from hypothesis import given, settings
from hypothesis import strategies as st
from task_support import trajectory

from rl_vlm.config.learner import AlgorithmSection
from rl_vlm.learning.estimators import ESTIMATORS, Estimate, EstimatorError, group_advantages, register_estimator
from rl_vlm.learning.plan import make_experience
from rl_vlm.types import TrajectoryGroup


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


ROUNDED = [0.1 + 0.2, 0.3, 0.3, 0.6 / 2]  # two of four differ in the last bit


@pytest.mark.parametrize("normalization", ["std", "none"])
def test_rewards_that_only_rounding_tells_apart_give_exactly_zero(normalization: str) -> None:
    assert len(set(ROUNDED)) > 1
    assert group_advantages(np.array(ROUNDED), normalization).tolist() == [0.0] * 4  # type: ignore[arg-type]
    assert group_advantages(1e-3 + 1e-6 * np.arange(4.0), normalization).all()  # type: ignore[arg-type]


@pytest.mark.parametrize("estimator", ["group", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gigpo"])
def test_a_group_that_only_rounding_tells_apart_is_counted_as_one_without_a_gradient(estimator: str) -> None:
    settings = AlgorithmSection(estimator=estimator)
    plan = plan_update([group_of(ROUNDED, [2, 1, 3, 2])], settings, np.random.default_rng(0))
    assert not plan.estimate.learns[0].any() and not plan.advantages[0].any()
    assert not any(minibatch.groups for batch in plan.batches for minibatch in batch.minibatches)


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


# --- the seam


def group_of(rewards: list[float], lengths: list[int]) -> TrajectoryGroup:
    turns = zip(lengths, rewards, strict=True)
    return TrajectoryGroup("g", 0, [trajectory(str(number), [turn], before=2) for number, turn in enumerate(turns)])


def test_leave_one_out_compares_with_the_mean_of_the_others() -> None:
    rewards = [1.0, 0.0, 0.5, 1.0]
    group = group_of(rewards, [1, 2, 3, 4])
    (advantages,) = ESTIMATORS.get("rloo")(
        make_experience([group], AlgorithmSection(), np.random.default_rng(0)), AlgorithmSection()
    ).advantages
    for number, tokens in enumerate(advantages):
        others = np.delete(rewards, number).mean()
        assert tokens.dtype == np.float32 and tokens.tolist() == pytest.approx(
            [rewards[number] - others] * (number + 1)
        )


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda group: [[np.zeros(3), np.zeros(2)]], "one number per sampled token"),
        (lambda group: [[np.zeros(3)]], "one array per trajectory"),
        (lambda group: [], "one array per trajectory"),
        (lambda group: [[np.full(3, np.nan), np.zeros(1)]], "not finite"),
    ],
)
def test_an_estimator_that_does_not_keep_to_the_seam_is_named(made: object, message: str) -> None:
    register_estimator("test_wrong")(lambda experience, settings: Estimate(made(experience.groups)))  # type: ignore[operator]
    with pytest.raises(EstimatorError):
        plan_update([group_of([0, 0], [3, 1])], AlgorithmSection(estimator="test_wrong"), np.random.default_rng(0))
