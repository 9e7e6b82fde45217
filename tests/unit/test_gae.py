"""GAE over tokens, turns and both, against Stable-Baselines3 and hand values; returns and their normalisation."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from stable_baselines3.common.buffers import RolloutBuffer
from task_support import trajectory

from rl_vlm.algorithms.policy import adapted_kl_coef
from rl_vlm.config.learner import AlgorithmSection
from rl_vlm.learning.estimators import (
    EstimatorError,
    Experience,
    Rescaling,
    ReturnScale,
    explained_variance,
    generalized_advantages,
    trajectory_gae,
)
from rl_vlm.learning.plan import Scores, make_experience
from rl_vlm.learning.policy_model import value_loss
from rl_vlm.types import TrajectoryGroup


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.5, 0.7)])
def test_token_level_equals_the_rollout_buffer_of_stable_baselines3(gamma: float, lam: float) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        steps = int(rng.integers(1, 30))
        rewards, values = rng.normal(size=steps).astype(np.float32), rng.normal(size=steps).astype(np.float32)
        space = gymnasium.spaces.Box(-1, 1, (1,))
        buffer = RolloutBuffer(steps, space, space, device="cpu", gae_lambda=lam, gamma=gamma)
        for step in range(steps):
            buffer.add(
                np.zeros((1, 1)), np.zeros((1, 1)), rewards[step : step + 1], np.array([step == 0]),
                torch.tensor(values[step : step + 1]), torch.zeros(1),
            )  # fmt: skip
        buffer.compute_returns_and_advantage(torch.zeros(1), np.array([True]))
        lengths = np.array([steps])
        settings = AlgorithmSection(name="ppo", gamma=gamma, gae_lambda=lam)
        # The turn's reward comes with its last token.
        paid = rewards.astype(np.float64)
        last, paid[-1] = paid[-1], 0.0
        advantages, returns = trajectory_gae(np.array([last]), paid, values.astype(np.float64), lengths, settings)
        np.testing.assert_allclose(advantages, buffer.advantages[:, 0], atol=2e-6, rtol=1e-6)
        np.testing.assert_allclose(returns, buffer.returns[:, 0], atol=2e-6, rtol=1e-6)


def test_turn_level_by_hand() -> None:
    settings = AlgorithmSection(name="ppo", gae_level="turn", turn_gamma=0.5, turn_lambda=0.5)
    # Turns of 2, 1 and 3 tokens; values before their first tokens 1, 2, 4, the others must not matter.
    values = np.array([1.0, 99, 2, 4, 99, 99])
    penalties = np.array([0.0, -1, 0, 0, 0, -2])
    advantages, returns = trajectory_gae(np.array([0.0, 1.0, 8.0]), penalties, values, np.array([2, 1, 3]), settings)
    # δ3 = 8 - 2 - 4 = 2; δ2 = 1 + .5·4 - 2 = 1; δ1 = -1 + .5·2 - 1 = -1; A2 = 1 + .25·2 = 1.5; A1 = -1 + .25·1.5
    assert advantages.tolist() == [-0.625, -0.625, 1.5, 2.0, 2.0, 2.0]
    np.testing.assert_array_equal(returns, [0.375, np.nan, 3.5, 6.0, np.nan, np.nan])


def test_bilevel_by_hand() -> None:
    settings = AlgorithmSection(
        name="ppo", gae_level="bilevel", turn_gamma=0.5, turn_lambda=1.0, gamma=1.0, gae_lambda=0.5
    )
    # Two turns of 2 tokens. Values before their last tokens: 2 and 4.
    values = np.array([1.0, 2, 3, 4])
    advantages, returns = trajectory_gae(np.array([1.0, 6.0]), np.zeros(4), values, np.array([2, 2]), settings)
    # Turns: A2 = 6 - 4 = 2; A1 = 1 + .5·4 - 2 + .5·2 = 2. Inside: A_first = (V_last - V_first) + .5·A_last = 1 + 1.
    assert advantages.tolist() == [2.0, 2.0, 2.0, 2.0]
    assert returns.tolist() == [3.0, 4.0, 5.0, 6.0]
    # A KL penalty on a first token lowers that token alone; on a last one it belongs to the turn.
    advantages, _ = trajectory_gae(np.array([1.0, 6.0]), np.array([-1.0, 0, 0, -2]), values, np.array([2, 2]), settings)
    # A2 = 4 - 4 = 0; A1 = 1 + 2 - 2 + .5·0 = 1; first tokens: 1 - 1 + .5·1 = .5 and 1 + .5·0 = 1.
    assert advantages.tolist() == [0.5, 1.0, 1.0, 0.0]


@pytest.mark.parametrize("level", ["token", "turn", "bilevel"])
def test_without_discount_and_with_lambda_1_every_level_gives_the_reward_to_come(level: str) -> None:
    rng = np.random.default_rng(2)
    settings = AlgorithmSection(name="ppo", gae_level=level)
    lengths = np.array([3, 1, 4])
    rewards, values = rng.normal(size=3), rng.normal(size=8)
    advantages, returns = trajectory_gae(rewards, np.zeros(8), values, lengths, settings)
    to_come = np.repeat(np.cumsum(rewards[::-1])[::-1], lengths)
    known = np.isfinite(returns)
    np.testing.assert_allclose(returns[known], to_come[known], atol=1e-12)
    first = np.array([0, 3, 4])
    np.testing.assert_allclose(advantages[first] + values[first], to_come[first], atol=1e-12)


def experience(values: Any = None) -> Experience:
    groups = [
        TrajectoryGroup("a", 0, [trajectory("a:0", [(2, 0.0), (2, 1.0)]), trajectory("a:1", [(3, 0.0)])]),
        TrajectoryGroup("b", 1, [trajectory("b:0", [(1, 1.0)]), trajectory("b:1", [])]),
    ]
    scores = None if values is None else Scores(values=values)
    return make_experience(groups, AlgorithmSection(name="ppo"), np.random.default_rng(0), scores, scale=ReturnScale())


VALUES = {
    "a:0": np.array([0.1, 0.2, 0.3, 0.4], np.float32), "a:1": np.array([0.5, 0.1, 0.0], np.float32),
    "b:0": np.array([0.7], np.float32),
}  # fmt: skip


def test_advantages_are_normalised_over_all_tokens_of_the_batch_and_returns_are_not() -> None:
    raw = generalized_advantages(experience(VALUES), AlgorithmSection(name="ppo", advantage_normalization="none"))
    normalised = generalized_advantages(experience(VALUES), AlgorithmSection(name="ppo", advantage_scale=3.0))
    flat = np.concatenate([t for group in raw.advantages for t in group])
    expected = 3 * (flat - flat.mean()) / flat.std(ddof=1)
    found = np.concatenate([t for group in normalised.advantages for t in group])
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert raw.advantages[0][0].tolist() == pytest.approx([0.9, 0.8, 0.7, 0.6])
    assert raw.returns is not None and normalised.returns is not None
    assert [r.tolist() for r in normalised.returns[0]] == [[1.0] * 4, [0.0] * 3]
    assert [len(r) for r in normalised.returns[1]] == [1, 0]


def test_advantages_that_only_rounding_tells_apart_are_exactly_zero_when_normalised() -> None:
    # Of each token: what is still to come, .1 + .2 or .3, minus the value 0.
    paid = [trajectory(f"g:{k}", [(1, reward)]) for k, reward in enumerate((0.1 + 0.2, 0.3, 0.3))]
    groups = [TrajectoryGroup("g", 0, paid)]
    settings = AlgorithmSection(name="ppo", estimator="gae")
    scores = Scores(values={one.trajectory_id: np.zeros(1, np.float32) for one in paid})
    one = make_experience(groups, settings, np.random.default_rng(0), scores, scale=ReturnScale())
    found = generalized_advantages(one, settings).advantages
    assert [tokens.tolist() for tokens in found[0]] == [[0.0]] * 3


def test_without_a_critic_it_says_so() -> None:
    with pytest.raises(EstimatorError):
        generalized_advantages(experience(), AlgorithmSection(name="ppo"))


def test_value_clipping_by_hand() -> None:
    new = torch.tensor([0.0, 1.0, 1.0, -1.0], requires_grad=True)
    old, returns = torch.zeros(4), torch.tensor([1.0, 1.0, 0.0, 1.0])
    # Moved by 1 towards the return: the bounded one, 0.2, counts. Moved away from it: the value itself counts.
    loss = value_loss(new, old, returns, 0.2)
    assert loss.tolist() == pytest.approx([0.5, 0.5 * 0.8**2, 0.5, 2.0])
    loss.sum().backward()  # type: ignore[no-untyped-call]
    assert new.grad is not None and new.grad.tolist() == pytest.approx([-1.0, 0.0, 1.0, -2.0])
    assert value_loss(new, old, returns, None).tolist() == pytest.approx([0.5, 0.0, 0.5, 2.0])


def test_the_scale_of_returns_weighs_iterations_without_the_bias_of_the_start() -> None:
    scale = ReturnScale()
    assert (scale.mean, scale.std) == (0.0, 1.0)
    first = scale.observe(np.array([1.0, 3.0, np.nan]))
    assert first.mean == pytest.approx(2.0) and first.std == pytest.approx(1.0)
    second = first.observe(np.array([4.0, 4.0]))
    # Weights .9·.1 and .1 over their sum .19.
    mean = (0.09 * 2 + 0.1 * 4) / 0.19
    assert second.mean == pytest.approx(mean)
    assert second.std == pytest.approx(((0.09 * 5 + 0.1 * 16) / 0.19 - mean**2) ** 0.5)
    assert first.observe(np.array([np.nan])) == first
    assert scale.observe(np.full(5, 7.0)).std == 0.01  # equal returns: bounded below
    # A critic that has seen no return says 0, and goes on saying so: from now on that is the mean return.
    assert scale.rescaling_to(first) == Rescaling()
    value = 0.3
    change = first.rescaling_to(second)
    assert (change.factor * value + change.shift) * second.std + second.mean == pytest.approx(
        value * first.std + first.mean
    )


def test_explained_variance() -> None:
    returns = np.array([0.0, 1.0, 0.0, 1.0, np.nan])
    assert explained_variance(returns, returns) == 1.0
    assert explained_variance(np.zeros(5), returns) == 0.0
    assert explained_variance(1 - returns, returns) == pytest.approx(-3.0)
    assert explained_variance(np.zeros(2), np.ones(2)) == 0.0
    rounded = np.array([0.1 + 0.2, 0.3])
    assert explained_variance(np.array([1.0, 2.0]), rounded) == 0.0


def test_the_kl_coefficient_follows_its_target_within_bounds() -> None:
    settings = AlgorithmSection(name="ppo", kl_in="reward", kl_target=0.02)
    assert adapted_kl_coef(0.1, 0.05, settings) == pytest.approx(0.15)
    assert adapted_kl_coef(0.1, 0.005, settings) == pytest.approx(0.1 / 1.5)
    assert adapted_kl_coef(0.1, 0.03, settings) == adapted_kl_coef(0.1, 0.011, settings) == 0.1
    assert adapted_kl_coef(0.4, 1.0, settings) == 0.5 and adapted_kl_coef(1.1e-5, 0.0, settings) == 1e-5
    fixed = AlgorithmSection(name="ppo", kl_in="reward", kl_coef=0.1)
    assert adapted_kl_coef(0.1, 5.0, fixed) == 0.1


def test_the_penalty_is_paid_per_token_and_sums_into_the_reward_of_a_trajectory() -> None:
    groups = [TrajectoryGroup("a", 0, [trajectory("a:0", [(2, 1.0)]), trajectory("a:1", [(1, 0.5)])])]
    scores = Scores(log_ratio={"a:0": np.array([0.5, -0.25], np.float32), "a:1": np.array([2.0], np.float32)})
    settings = AlgorithmSection(kl_in="reward", kl_coef=0.1)
    made = make_experience(groups, settings, np.random.default_rng(0), scores, kl_coef=0.2)
    assert made.token_rewards is not None
    assert made.token_rewards[0][0].tolist() == pytest.approx([-0.1, 0.05])
    assert made.rewards[0].tolist() == pytest.approx([0.95, 0.1])
