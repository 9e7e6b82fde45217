"""Group-relative advantages: by hand, against TRL's formula, and exactly zero where nothing can be learned."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from core_support import plan_update, planned_by
from hypothesis import given, settings
from hypothesis import strategies as st
from stable_baselines3.common.buffers import RolloutBuffer
from task_support import trajectory

from rl_vlm.algorithms.policy import adapted_kl_coef
from rl_vlm.config.learner import WITHOUT_CRITIC, AlgorithmSection
from rl_vlm.learning.critic import value_loss
from rl_vlm.learning.estimators import ESTIMATORS, generalized_advantages, group_advantages, register_estimator
from rl_vlm.learning.experience import Estimate, EstimatorError, Experience
from rl_vlm.learning.gae import trajectory_gae
from rl_vlm.learning.plan import Scores, make_experience
from rl_vlm.learning.returns import Rescaling, ReturnScale, explained_variance
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


ROUNDED = [0.1 + 0.2, 0.3, 0.3, 0.6 / 2]  # two of four differ in the last bit


@pytest.mark.parametrize("normalization", ["std", "none"])
def test_rewards_that_are_equal_but_for_rounding_give_exactly_zero(normalization: Any) -> None:
    assert len(set(ROUNDED)) > 1
    equal = [[reward] * size for reward in (0.0, 0.1, 0.2, 1.0, -0.3, 1e9 / 3, 1e-300) for size in (1, 2, 3, 7, 8, 33)]
    for rewards in (ROUNDED, *equal):
        assert not group_advantages(np.array(rewards), normalization).any()
    assert group_advantages(1e-3 + 1e-6 * np.arange(4.0), normalization).all()


@pytest.mark.parametrize("estimator", ["group", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gigpo"])
def test_a_group_that_only_rounding_tells_apart_is_counted_as_one_without_a_gradient(estimator: str) -> None:
    settings = AlgorithmSection(estimator=estimator)
    plan = plan_update([group_of(ROUNDED, [2, 1, 3, 2])], settings, np.random.default_rng(0))
    assert not plan.advantages[0].any()
    assert not any(minibatch.groups for batch in plan.batches for minibatch in batch.minibatches)


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
    made = make_experience([group], planned_by(AlgorithmSection()), np.random.default_rng(0))
    for number, tokens in enumerate(ESTIMATORS["rloo"](made, AlgorithmSection()).advantages.values()):
        others = np.delete(rewards, number).mean()
        assert tokens.dtype == np.float32 and tokens.tolist() == pytest.approx(
            [rewards[number] - others] * (number + 1)
        )


@pytest.mark.parametrize(
    "made",
    [{"0": np.zeros(3), "1": np.zeros(2)}, {"0": np.zeros(3)}, {}, {"0": np.full(3, np.nan), "1": np.zeros(1)}],
)
def test_an_estimator_that_does_not_keep_to_the_seam_is_named(made: dict[str, np.ndarray]) -> None:
    register_estimator("test_wrong")(lambda experience, settings: Estimate(made))
    with pytest.raises(EstimatorError):
        plan_update([group_of([0, 0], [3, 1])], AlgorithmSection(estimator="test_wrong"), np.random.default_rng(0))


# --- REINFORCE++, its baseline variant and GiGPO by their papers' formulas, and what holds for every estimator


TurnSpec = tuple[int, float, str]  # tokens, reward, state


def experience_of(
    groups: list[list[list[TurnSpec]]], token_rewards: list[list[np.ndarray]] | None = None
) -> Experience:
    made = [
        TrajectoryGroup(str(g), g, [trajectory(f"{g}:{n}", turns, before=2) for n, turns in enumerate(group)])
        for g, group in enumerate(groups)
    ]
    rewards = [[np.array([reward for _, reward, _ in turns]) for turns in group] for group in groups]
    return Experience(made, by_name(rewards), by_name(token_rewards or []))


def by_name(arrays: list[list[np.ndarray]]) -> dict[str, np.ndarray]:
    return {f"{g}:{n}": array for g, group in enumerate(arrays) for n, array in enumerate(group)}


def estimate(name: str, experience: Experience, **changes: Any) -> Estimate:
    return ESTIMATORS[name](experience, AlgorithmSection(estimator=name, **changes))


GROUPS: list[list[list[TurnSpec]]] = [
    [[(2, 1.0, "s"), (3, 0.5, "t")], [(1, 0.0, "s")], [(4, 0.25, "s"), (1, 0.0, "t"), (2, 1.0, "s")]],
    [[(3, 1.0, "u")], [(2, 0.0, "u"), (2, 0.0, "v")], [(1, 1.0, "u")]],
]


def penalties(seed: int) -> list[list[np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [
        [rng.normal(0, 0.1, sum(turn[0] for turn in turns)).astype(np.float32) for turns in group] for group in GROUPS
    ]


@pytest.mark.parametrize("with_penalty", [False, True])
def test_reinforce_pp_is_the_return_of_each_token_over_the_batch(with_penalty: bool) -> None:
    """arXiv 2501.03262: A_t = sum of the rewards from t on (the KL penalty among them), then (A - mean) / std of the batch."""
    token_rewards = penalties(0) if with_penalty else None
    found = estimate("reinforce_pp", experience_of(GROUPS, token_rewards), advantage_scale=3.0)
    raw: list[float] = []
    for g, group in enumerate(GROUPS):
        for n, turns in enumerate(group):
            rewards = []
            for length, reward, _ in turns:
                rewards += [0.0] * (length - 1) + [reward]
            if token_rewards is not None:
                rewards = [a + float(b) for a, b in zip(rewards, token_rewards[g][n], strict=True)]
            raw += [sum(rewards[t:]) for t in range(len(rewards))]
    mean = sum(raw) / len(raw)
    std = (sum((value - mean) ** 2 for value in raw) / len(raw)) ** 0.5
    flat = np.concatenate(list(found.advantages.values()))
    assert flat.dtype == np.float32
    assert flat.tolist() == pytest.approx([3 * (value - mean) / (std + 1e-6) for value in raw], abs=1e-6)
    assert list(map(len, found.advantages.values())) == [5, 1, 7, 3, 4, 1]


def test_reinforce_pp_baseline_subtracts_the_groups_mean_first() -> None:
    found = estimate("reinforce_pp_baseline", experience_of(GROUPS))
    raw, lengths = [], []
    for group in GROUPS:
        totals = [sum(turn[1] for turn in turns) for turns in group]
        for turns, total in zip(group, totals, strict=True):
            length = sum(turn[0] for turn in turns)
            raw += [total - sum(totals) / len(totals)] * length
            lengths.append(length)
    mean = sum(raw) / len(raw)
    std = (sum((value - mean) ** 2 for value in raw) / len(raw)) ** 0.5
    flat = np.concatenate(list(found.advantages.values()))
    assert flat.tolist() == pytest.approx([(value - mean) / (std + 1e-6) for value in raw], abs=1e-6)


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
def test_a_batch_of_equal_rewards_gives_exactly_zero(name: str) -> None:
    groups: list[list[list[TurnSpec]]] = [[[(length, 0.1, "")] for length in (1, 3, 2)] for _ in range(3)]
    assert not any(tokens.any() for tokens in estimate(name, experience_of(groups)).advantages.values())
    assert estimate(name, experience_of([])).advantages == {}
    assert estimate(name, experience_of([[[], []]])).advantages["0:0"].tolist() == []


# --- GiGPO


def relative(values: list[float], normalization: str) -> list[float]:
    mean = sum(values) / len(values)
    centred = [value - mean for value in values]
    if normalization == "none" or len(values) < 2 or len(set(values)) < 2:
        return centred if len(set(values)) > 1 else [0.0] * len(values)
    std = (sum(value**2 for value in centred) / (len(values) - 1)) ** 0.5
    return [value / (std + 1e-6) for value in centred]


@pytest.mark.parametrize("normalization", ["std", "none"])
@pytest.mark.parametrize("with_penalty", [False, True])
def test_gigpo_is_the_episode_advantage_plus_that_of_turns_from_the_same_state(
    normalization: str, with_penalty: bool
) -> None:
    """arXiv 2505.10978: A = A_episode + ω A_step; A_step compares discounted returns of turns of a group in one state."""
    gamma, weight = 0.9, 0.5
    token_rewards = penalties(1) if with_penalty else None
    found = estimate(
        "gigpo", experience_of(GROUPS, token_rewards), gigpo_gamma=gamma, gigpo_step_weight=weight,
        advantage_normalization=normalization,
    )  # fmt: skip
    for g, group in enumerate(GROUPS):
        rewards = []
        for n, turns in enumerate(group):
            start, paid = 0, []
            for length, reward, _ in turns:
                added = token_rewards[g][n][start : start + length].astype(float).sum() if token_rewards else 0.0
                paid.append(reward + added)
                start += length
            rewards.append(paid)
        episode = relative([sum(paid) for paid in rewards], normalization)
        returns = {
            (n, k): sum(gamma ** (later - k) * paid[later] for later in range(k, len(paid)))
            for n, paid in enumerate(rewards)
            for k in range(len(paid))
        }
        for n, turns in enumerate(group):
            expected: list[float] = []
            for k, (length, _, state) in enumerate(turns):
                places = [
                    (m, j) for m, others in enumerate(group) for j, other in enumerate(others) if other[2] == state
                ]
                step = relative([returns[place] for place in places], normalization)[places.index((n, k))]
                expected += [episode[n] + weight * step] * length
            assert found.advantages[f"{g}:{n}"].tolist() == pytest.approx(expected, abs=1e-6)


def test_gigpo_without_known_or_repeated_states_is_grpo() -> None:
    unknown = [[[(length, reward, "") for length, reward, _ in turns] for turns in group] for group in GROUPS]
    alone = [
        [[(length, reward, f"{n}{k}") for k, (length, reward, _) in enumerate(turns)] for n, turns in enumerate(group)]
        for group in GROUPS
    ]
    for groups in (unknown, alone):
        experience = experience_of(groups)
        ours, grpo = (estimate(name, experience).advantages for name in ("gigpo", "group"))
        assert all(np.allclose(ours[name], grpo[name], atol=1e-7) for name in grpo)


def test_equal_states_of_other_groups_are_not_compared() -> None:
    """They are other tasks, which may look alike."""
    groups: list[list[list[TurnSpec]]] = [[[(1, 1.0, "s")], [(1, 1.0, "s")]], [[(1, 0.0, "s")], [(1, 0.0, "s")]]]
    assert not any(tokens.any() for tokens in estimate("gigpo", experience_of(groups)).advantages.values())


# --- what holds for every estimator

SPECS = st.tuples(st.integers(1, 4), st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.sampled_from(["s", "t", ""]))
BATCHES = st.lists(st.lists(st.lists(SPECS, min_size=1, max_size=3), min_size=1, max_size=5), min_size=1, max_size=3)


@pytest.mark.parametrize("name", WITHOUT_CRITIC)
@settings(max_examples=50, deadline=None)
@given(groups=BATCHES, seed=st.integers(0, 100))
def test_permuting_a_group_permutes_its_advantages(name: str, groups: list[list[list[TurnSpec]]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    orders = [rng.permutation(len(group)) for group in groups]
    before = estimate(name, experience_of(groups)).advantages
    after = estimate(
        name, experience_of([[group[k] for k in order] for group, order in zip(groups, orders, strict=True)])
    ).advantages
    for g, order in enumerate(orders):
        for place, k in enumerate(order):
            new = after[f"{g}:{place}"]
            # Equal rewards differ in the last digit of a mean that is added up in another order.
            assert new.dtype == np.float32 and np.allclose(new, before[f"{g}:{k}"], atol=1e-4)


# --- GAE over tokens, turns and both, against Stable-Baselines3 and hand values; returns and their normalisation


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
    return make_experience(
        groups, planned_by(AlgorithmSection(name="ppo")), np.random.default_rng(0), scores, scale=ReturnScale()
    )


VALUES = {
    "a:0": np.array([0.1, 0.2, 0.3, 0.4], np.float32), "a:1": np.array([0.5, 0.1, 0.0], np.float32),
    "b:0": np.array([0.7], np.float32),
}  # fmt: skip


def test_advantages_are_normalised_over_all_tokens_of_the_batch_and_returns_are_not() -> None:
    raw = generalized_advantages(experience(VALUES), AlgorithmSection(name="ppo", advantage_normalization="none"))
    normalised = generalized_advantages(experience(VALUES), AlgorithmSection(name="ppo", advantage_scale=3.0))
    flat, found = (np.concatenate(list(one.advantages.values())) for one in (raw, normalised))
    np.testing.assert_allclose(found, 3 * (flat - flat.mean()) / flat.std(ddof=1), atol=1e-5)
    assert raw.advantages["a:0"].tolist() == pytest.approx([0.9, 0.8, 0.7, 0.6])
    assert [returns.tolist() for returns in normalised.returns.values()] == [[1.0] * 4, [0.0] * 3, [1.0], []]


def test_advantages_that_only_rounding_tells_apart_are_exactly_zero_when_normalised() -> None:
    # Of each token: what is still to come, .1 + .2 or .3, minus the value 0.
    paid = [trajectory(f"g:{k}", [(1, reward)]) for k, reward in enumerate((0.1 + 0.2, 0.3, 0.3))]
    groups = [TrajectoryGroup("g", 0, paid)]
    settings = AlgorithmSection(name="ppo", estimator="gae")
    scores = Scores(values={one.trajectory_id: np.zeros(1, np.float32) for one in paid})
    one = make_experience(groups, planned_by(settings), np.random.default_rng(0), scores, scale=ReturnScale())
    found = generalized_advantages(one, settings).advantages
    assert [tokens.tolist() for tokens in found.values()] == [[0.0]] * 3


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
    made = make_experience(groups, planned_by(settings), np.random.default_rng(0), scores, kl_coef=0.2)
    assert made.token_rewards["a:0"].tolist() == pytest.approx([-0.1, 0.05])
    assert made.rewards[0].tolist() == pytest.approx([0.95, 0.1])
