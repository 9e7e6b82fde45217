"""REINFORCE++, its baseline variant and GiGPO by their papers' formulas, and what holds for every estimator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from task_support import trajectory

from rl_vlm.config.learner import WITHOUT_CRITIC, AlgorithmSection
from rl_vlm.learning.estimators import ESTIMATORS, Estimate, Experience
from rl_vlm.types import TrajectoryGroup

TurnSpec = tuple[int, float, str]  # tokens, reward, state


def experience_of(
    groups: list[list[list[TurnSpec]]], token_rewards: list[list[np.ndarray]] | None = None
) -> Experience:
    made = [
        TrajectoryGroup(str(g), g, [trajectory(f"{g}:{n}", turns, before=2) for n, turns in enumerate(group)])
        for g, group in enumerate(groups)
    ]
    rewards = [[np.array([reward for _, reward, _ in turns]) for turns in group] for group in groups]
    return Experience(made, rewards, token_rewards)


def estimate(name: str, experience: Experience, **changes: Any) -> Estimate:
    return ESTIMATORS.get(name)(experience, AlgorithmSection(estimator=name, **changes))


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
    flat = np.concatenate([tokens for group in found.advantages for tokens in group])
    assert flat.dtype == np.float32
    assert flat.tolist() == pytest.approx([3 * (value - mean) / (std + 1e-6) for value in raw], abs=1e-6)
    assert [[len(tokens) for tokens in group] for group in found.advantages] == [[5, 1, 7], [3, 4, 1]]


def test_reinforce_pp_knows_no_group() -> None:
    """A group whose members are all right is still told so, unlike with the group's mean."""
    groups: list[list[list[TurnSpec]]] = [[[(2, 1.0, "")]] * 2, [[(2, 0.0, "")]] * 2]
    experience = experience_of(groups)
    assert [tokens.tolist() for tokens in estimate("reinforce_pp", experience).advantages[0]] == [
        pytest.approx([1, 1], abs=1e-5)
    ] * 2
    for name in ("group", "rloo", "reinforce_pp_baseline", "gigpo"):
        assert not any(tokens.any() for group in estimate(name, experience).advantages for tokens in group)


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
    flat = np.concatenate([tokens for group in found.advantages for tokens in group])
    assert flat.tolist() == pytest.approx([(value - mean) / (std + 1e-6) for value in raw], abs=1e-6)


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
def test_a_batch_of_equal_rewards_gives_exactly_zero(name: str) -> None:
    groups: list[list[list[TurnSpec]]] = [[[(length, 0.1, "")] for length in (1, 3, 2)] for _ in range(3)]
    assert not any(tokens.any() for group in estimate(name, experience_of(groups)).advantages for tokens in group)
    assert estimate(name, experience_of([])).advantages == []
    assert estimate(name, experience_of([[[], []]])).advantages[0][0].tolist() == []


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
            assert found.advantages[g][n].tolist() == pytest.approx(expected, abs=1e-6)


def test_gigpo_without_known_or_repeated_states_is_grpo() -> None:
    unknown = [[[(length, reward, "") for length, reward, _ in turns] for turns in group] for group in GROUPS]
    alone = [
        [[(length, reward, f"{n}{k}") for k, (length, reward, _) in enumerate(turns)] for n, turns in enumerate(group)]
        for group in GROUPS
    ]
    for groups in (unknown, alone):
        experience = experience_of(groups)
        for ours, grpo in zip(
            estimate("gigpo", experience).advantages, estimate("group", experience).advantages, strict=True
        ):
            assert all(np.allclose(a, b, atol=1e-7) for a, b in zip(ours, grpo, strict=True))


def test_equal_states_of_other_groups_are_not_compared() -> None:
    """They are other tasks, which may look alike."""
    groups: list[list[list[TurnSpec]]] = [[[(1, 1.0, "s")], [(1, 1.0, "s")]], [[(1, 0.0, "s")], [(1, 0.0, "s")]]]
    assert not any(t.any() for group in estimate("gigpo", experience_of(groups)).advantages for t in group)


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
    for old, new, order in zip(before, after, orders, strict=True):
        for place, k in enumerate(order):
            assert new[place].dtype == np.float32
            # Equal rewards differ in the last digit of a mean that is added up in another order.
            assert np.allclose(new[place], old[k], atol=1e-4)
