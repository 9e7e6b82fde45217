"""From groups to optimiser steps: weights, shards and what is skipped never change the gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import task_support
import torch
from core_support import Plan, Sample, adapted_policy, conversation, gradient_vector, picture, plan_update, planned_by

from rl_vlm.config import parse_config
from rl_vlm.config.learner import PRESETS, AlgorithmSection
from rl_vlm.learning.plan import UpdateBatch, UpdateStats, make_experience, overlong_penalty
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.learning.strategies import Strategy
from rl_vlm.learning.update import PolicyUpdater
from rl_vlm.models.images import TextSide
from rl_vlm.types import Trajectory, TrajectoryGroup, Turn

AGGREGATIONS = ["sequence_mean", "token_mean", "constant"]


def bare(name: str, prompt: int, sampled: int, reward: float) -> Trajectory:
    """A trajectory without a model: `prompt` tokens, then `sampled` ones."""
    return task_support.trajectory(name, [(sampled, reward)] if sampled else [], before=prompt)


def bare_groups(count: int, size: int = 4, seed: int = 0) -> list[TrajectoryGroup]:
    rng = np.random.default_rng(seed)
    return [
        TrajectoryGroup(
            f"g{k}",
            k,
            [
                bare(f"g{k}:{n}", int(rng.integers(3, 40)), int(rng.integers(1, 30)), float(rng.integers(0, 4)))
                for n in range(size)
            ],
        )
        for k in range(count)
    ]


def plan_of(groups: Sequence[TrajectoryGroup], seed: int = 0, **config: Any) -> Plan:
    sizes = {name: config.pop(name) for name in ("num_learners", "max_new_tokens") if name in config}
    if config.pop("keep_zero_advantage", False):
        config["entropy_coef"] = 1.0  # gives every sample a gradient
    settings = AlgorithmSection(**{"aggregation": "token_mean", **config})
    return plan_update(groups, settings, np.random.default_rng(seed), **sizes)


def samples_of(plan: Plan, step: int) -> list[Sample]:
    parts = [(batch, batch.minibatches[step]) for batch in plan.batches]
    return [
        Sample(one, batch.advantages[one.trajectory_id], part.weights[one.trajectory_id])
        for batch, part in parts
        for group in part.groups
        for one in group
    ]


# --- weights


def test_weights_by_hand() -> None:
    group = TrajectoryGroup("g", 0, [bare("a", 3, 2, 1.0), bare("b", 3, 6, 0.0)])

    def weights(aggregation: str) -> dict[str, float]:
        plan = plan_of([group], aggregation=aggregation, max_new_tokens=10)
        return {sample.trajectory.trajectory_id: sample.weight for sample in samples_of(plan, 0)}

    assert weights("sequence_mean") == pytest.approx({"a": 1 / 4, "b": 1 / 12})
    assert weights("token_mean") == pytest.approx({"a": 1 / 8, "b": 1 / 8})
    assert weights("constant") == pytest.approx({"a": 1 / 20, "b": 1 / 20})


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_skipped_samples_count_in_the_normaliser(aggregation: str) -> None:
    groups = bare_groups(4)
    flat = TrajectoryGroup("flat", 9, [bare(f"flat:{n}", 5, 7, 0.5) for n in range(4)])
    kept = samples_of(plan_of([*groups, flat], aggregation=aggregation, keep_zero_advantage=True), 0)
    skipped = samples_of(plan_of([*groups, flat], aggregation=aggregation), 0)
    weights = {sample.trajectory.trajectory_id: sample.weight for sample in kept}
    assert len(kept) == 20
    assert all(not sample.trajectory.trajectory_id.startswith("flat") for sample in skipped)
    assert all(sample.weight == weights[sample.trajectory.trajectory_id] for sample in skipped)
    everything = [trajectory for group in [*groups, flat] for trajectory in group.trajectories]
    tokens = sum(trajectory.num_sampled for trajectory in everything)
    for sample in skipped:
        expected = {
            "sequence_mean": 1 / (20 * sample.trajectory.num_sampled),
            "token_mean": 1 / tokens,
            "constant": 1 / 20,
        }
        assert sample.weight == pytest.approx(expected[aggregation])


# --- who does what


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("learners", [1, 2, 3, 8])
@pytest.mark.parametrize("minibatches", [1, 2, 5])
def test_every_sample_that_teaches_is_dealt_exactly_once(minibatches: int, learners: int, keep: bool) -> None:
    groups = bare_groups(5)
    plan = plan_of(groups, minibatches=minibatches, num_learners=learners, keep_zero_advantage=keep)
    assert len(plan.batches) == learners
    assert all(len(batch.minibatches) == minibatches == len(batch.active) for batch in plan.batches)
    dealt = Counter(s.trajectory.trajectory_id for step in range(minibatches) for s in samples_of(plan, step))
    wanted = Counter(
        trajectory.trajectory_id
        for group, advantages in zip(groups, plan.advantages, strict=True)
        for trajectory, advantage in zip(group.trajectories, advantages, strict=True)
        if keep or advantage
    )
    assert dealt == wanted


def test_groups_stay_together_on_one_learner_in_one_step() -> None:
    plan = plan_of(bare_groups(9), minibatches=3, num_learners=2, keep_zero_advantage=True)
    for batch in plan.batches:
        for minibatch in batch.minibatches:
            for group in minibatch.groups:
                assert len(group) == 4
                assert len({trajectory.trajectory_id.split(":")[0] for trajectory in group}) == 1


def test_trajectories_without_a_sampled_token_are_left_out() -> None:
    group = TrajectoryGroup("g", 0, [bare("none", 4, 0, 0.0), bare("some", 4, 2, 1.0)])
    for aggregation in AGGREGATIONS:
        samples = samples_of(plan_of([group], aggregation=aggregation, keep_zero_advantage=True), 0)
        assert [sample.trajectory.trajectory_id for sample in samples] == ["some"]
        assert np.isfinite(samples[0].weight)


def test_the_order_depends_on_the_generator_alone() -> None:
    def order(seed: int) -> list[str]:
        plan = plan_of(bare_groups(8), seed=seed, minibatches=8, keep_zero_advantage=True)
        return [samples_of(plan, step)[0].trajectory.trajectory_id for step in range(8)]

    assert order(1) == order(1)
    assert order(1) != order(2)


# --- the control that must fail


def test_shuffled_rewards_are_the_same_rewards_in_other_places() -> None:
    groups = bare_groups(6)
    for number, group in enumerate(groups):
        for place, trajectory in enumerate(group.trajectories):
            turn = trajectory.turns[0]
            trajectory.turns = (Turn(turn.start, turn.stop, 0, turn.stop_reason, 10.0 * number + place),)
    before = [group.rewards.tolist() for group in groups]
    plan = plan_of(groups, shuffle_rewards=True, advantage_normalization="none")
    assert [group.rewards.tolist() for group in groups] == before  # the logged rewards stay what they were
    # Advantages are rewards minus their group's mean: differences between rewards of other groups appear.
    differences = {round(a - b, 6) for advantages in plan.advantages for a in advantages for b in advantages}
    assert max(abs(d) for d in differences) > 10
    assert [len(a) for a in plan.advantages] == [4] * 6
    assert plan_of(groups, advantage_normalization="none").advantages[0].tolist() == [-1.5, -0.5, 0.5, 1.5]


# --- the penalty for long answers


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0.0), (12, 0.0), (13, -1 / 8), (16, -0.5), (19, -7 / 8), (20, -1.0), (25, -1.0)]
)
def test_the_overlong_penalty_by_hand(length: int, penalty: float) -> None:
    """DAPO's equation 13 with L_max = 20 and L_cache = 8."""
    assert overlong_penalty(length, 20, 8) == pytest.approx(penalty)


def test_long_answers_lose_reward_only_with_a_buffer() -> None:
    group = TrajectoryGroup("g", 0, [bare("short", 3, 10, 1.0), bare("long", 3, 18, 1.0), bare("none", 3, 0, 0.0)])
    for buffer, expected in ((8, [1.0, 1 - 6 / 8, 0.0]), (0, [1.0, 1.0, 0.0])):
        settings = AlgorithmSection(overlong_buffer=buffer)
        found = make_experience([group], planned_by(settings, max_new_tokens=20), np.random.default_rng(0))
        assert found.rewards[0].tolist() == pytest.approx(expected)
    assert group.rewards.tolist() == [1.0, 1.0, 0.0]  # what is logged
    plan = plan_of([group], overlong_buffer=8, max_new_tokens=20, advantage_normalization="none")
    assert plan.advantages[0][0] > plan.advantages[0][1]


def test_the_control_permutes_the_penalty_too() -> None:
    """Else a policy would learn its length from it."""
    groups = bare_groups(6)
    settings = AlgorithmSection(overlong_buffer=20, shuffle_rewards=True)
    shuffled, plain = (
        make_experience(groups, planned_by(chosen, max_new_tokens=30), np.random.default_rng(0))
        for chosen in (settings, settings.model_copy(update={"shuffle_rewards": False}))
    )
    before, after = np.concatenate(plain.rewards), np.concatenate(shuffled.rewards)
    assert sorted(after) == pytest.approx(sorted(before))
    assert not np.allclose(after, before)


# --- gradients


@pytest.fixture(scope="module")
def policy(tiny_folder: Path) -> PolicyModel:
    return adapted_policy(tiny_folder)


@pytest.fixture(scope="module")
def groups(text: TextSide) -> list[TrajectoryGroup]:
    """Five groups of real conversations; one of them has equal rewards."""
    rng = np.random.default_rng(1)
    made = []
    for k in range(5):
        prompt = [picture(rng, 64, 32), f"Question {k}: what is this?"]
        members = [
            conversation(
                text, rng, prompt, [int(rng.integers(1, 9)), int(rng.integers(1, 5))], [["again", picture(rng)]]
            )
            for _ in range(3)
        ]
        for n, member in enumerate(members):
            last = member.turns[-1]
            reward = 1.0 if k == 2 else float(n == k % 3)
            member.turns = (
                Turn(*(getattr(member.turns[0], name) for name in ("start", "stop", "policy_version", "stop_reason"))),
                Turn(last.start, last.stop, last.policy_version, last.stop_reason, reward),
            )
        made.append(TrajectoryGroup(f"g{k}", k, members))
    return made


def gradient(policy: PolicyModel, text: TextSide, batches: Sequence[UpdateBatch], **settings: Any) -> torch.Tensor:
    """The sum of what each learner's part of one step adds."""
    updater = PolicyUpdater(policy, parse_config({"algorithm": settings, "learner": {"micro_batch_tokens": 300}}))
    total = torch.zeros_like(gradient_vector(policy.parameters))
    for batch in batches:  # one learner each
        policy.model.zero_grad(set_to_none=True)
        (packed,) = updater.pack(batch)
        for micro in packed:
            updater.loss(micro, UpdateStats()).backward()
        total += gradient_vector(policy.parameters)
    return total


@pytest.mark.parametrize("preset", [name for name in PRESETS if PRESETS[name]["estimator"] != "gae"])
def test_the_number_of_learners_does_not_change_the_gradient(
    policy: PolicyModel, text: TextSide, groups: list[TrajectoryGroup], preset: str
) -> None:
    found = []
    for learners in (1, 2, 3):
        plan = plan_of(
            groups, preset=preset, aggregation=PRESETS[preset]["aggregation"], num_learners=learners, max_new_tokens=20
        )
        found.append(gradient(policy, text, plan.batches, preset=preset))
    assert found[0].abs().max() > 1e-3
    for other in found[1:]:
        assert torch.allclose(other, found[0], rtol=1e-4, atol=1e-6)


def test_skipping_samples_without_advantage_does_not_change_the_gradient(
    policy: PolicyModel, text: TextSide, groups: list[TrajectoryGroup]
) -> None:
    found = [gradient(policy, text, plan_of(groups, keep_zero_advantage=keep).batches) for keep in (True, False)]
    assert torch.allclose(*found, rtol=1e-4, atol=1e-7)


def test_the_optimizer_step_adds_gradients_over_micro_batches_and_clips(
    tiny_folder: Path, text: TextSide, groups: list[TrajectoryGroup]
) -> None:
    policy = adapted_policy(tiny_folder)
    plan = plan_of(groups)
    expected = gradient(policy, text, plan.batches)
    before = torch.cat([p.detach().reshape(-1).clone() for p in policy.parameters])
    updater = PolicyUpdater(policy, parse_config({"learner": {"micro_batch_tokens": 300}}))
    norm = float(expected.norm())
    for max_norm, scale in ((10 * norm, 1.0), (norm / 4, 0.25)):
        strategy, stats = Strategy(policy, torch.optim.SGD(policy.parameters, lr=1.0)), UpdateStats()
        updater.step(strategy, updater.pack(plan.batches[0])[0], max_norm, stats)
        after = torch.cat([p.detach().reshape(-1) for p in policy.parameters])
        assert torch.allclose(before - after, scale * expected, rtol=1e-3, atol=1e-5)
        assert stats["policy/grad_norm"] == pytest.approx(norm, rel=1e-4)
        with torch.no_grad():
            restore(policy, before)


def restore(policy: PolicyModel, values: torch.Tensor) -> None:
    offset = 0
    for parameter in policy.parameters:
        parameter.copy_(values[offset : offset + parameter.numel()].view_as(parameter))
        offset += parameter.numel()


def test_learners_get_about_the_same_work() -> None:
    plan = plan_of(bare_groups(24, seed=3), num_learners=3, keep_zero_advantage=True)
    loads = [sum(len(one) for group in batch.minibatches[0].groups for one in group) for batch in plan.batches]
    assert max(loads) < 1.1 * min(loads)


def test_steps_without_an_advantage_are_inactive_for_all_learners() -> None:
    flat = [TrajectoryGroup(f"f{k}", k, [bare(f"f{k}:{n}", 5, 3, 0.1) for n in range(4)]) for k in range(3)]
    teaching = TrajectoryGroup("t", 9, [bare(f"t:{n}", 5, 3, float(n)) for n in range(4)])
    plan = plan_of([*flat, teaching], minibatches=4, num_learners=2)
    assert sorted(plan.active) == [False, False, False, True]
    assert sum(not advantages.any() for advantages in plan.advantages) == 3
    for step, active in enumerate(plan.active):
        assert bool(samples_of(plan, step)) is active
    assert plan_of(flat, minibatches=3).active == [False] * 3
    assert plan_of(flat, minibatches=3, keep_zero_advantage=True).active == [True] * 3
