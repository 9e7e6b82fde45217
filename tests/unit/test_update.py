"""The policy update on real rollouts: honest ratios, one old policy per rollout, and an engine that agrees with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_support import (
    adapted_policy,
    batch_of,
    conversation,
    picture,
    plain_model,
    reference_logprobs,
    run_config,
    text_side,
    train_sample,
)
from policy_loop import Loop, check_agreement
from torch import Tensor

from rl_vlm.config import LearnerSection
from rl_vlm.learning.batching import MicroBatch
from rl_vlm.learning.optimizer import lr_factor
from rl_vlm.learning.plan import UpdateBatch, UpdateStats
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.learning.update import PolicyUpdater

# --- engine and learner


@pytest.mark.parametrize(("temperature", "updates"), [(0.7, 5), pytest.param(1.0, 20, marks=pytest.mark.slow)])
def test_engine_and_learner_agree_after_updates(tiny_folder: Path, temperature: float, updates: int) -> None:
    loop = Loop(tiny_folder, temperature, learner__lr=1e-2)
    check_agreement(loop, updates)
    loop.close()


# --- ratios


@pytest.fixture
def loop(tiny_folder: Path) -> Any:
    loop = Loop(tiny_folder, 0.9, learner__lr=1e-2)
    yield loop
    loop.close()


def values(loop: Loop, micro_batches: list[MicroBatch]) -> list[Tensor]:
    with torch.no_grad():
        return [loop.updater.logprobs(micro)[0] for micro in micro_batches]


def test_the_ratio_is_exactly_one_until_the_weights_change(loop: Loop) -> None:
    """Also where the old log-probabilities come from a pass of their own, without a graph."""
    packed = loop.updater.pack(loop.batch(loop.sample(4)))
    stats = UpdateStats()
    for minibatch in packed:
        assert minibatch
        for micro in minibatch:
            loop.updater.loss(micro, stats)
    assert packed[0][0].old is not None
    assert (
        stats["policy/ratio_max"],
        stats["policy/clip_fraction"],
        stats["policy/approx_kl"],
        stats["policy/first_ratio_error"],
    ) == (1.0, 0.0, 0.0, 0.0)


def test_old_logprobs_are_those_before_the_first_step(loop: Loop) -> None:
    packed = loop.updater.pack(loop.batch(loop.sample(4)))
    before = [values(loop, minibatch) for minibatch in packed]
    first, second = UpdateStats(), UpdateStats()
    loop.step(packed[0], first)
    loop.step(packed[1], second)
    assert (first["policy/ratio_max"], first["policy/clip_fraction"], first["policy/approx_kl"]) == (1.0, 0.0, 0.0)
    assert second["policy/ratio_max"] > 1.001
    for minibatch, expected in zip(packed, before, strict=True):
        for micro, value in zip(minibatch, expected, strict=True):
            assert micro.old is not None
            assert torch.equal(micro.old, value)
            assert not micro.old.requires_grad


def test_further_epochs_compare_with_the_same_old_policy(loop: Loop) -> None:
    packed = loop.updater.pack(loop.batch(loop.sample(4), count=1))
    before = values(loop, packed[0])
    for epoch in range(3):
        stats = UpdateStats()
        now = values(loop, packed[0])
        loop.step(packed[0], stats)
        expected = max(float((new - old).exp().max()) for new, old in zip(now, before, strict=True))
        assert stats["policy/ratio_max"] == pytest.approx(expected, rel=1e-6)
        assert (stats["policy/ratio_max"] == 1.0) is (epoch == 0)


# --- steps


def flat(policy: PolicyModel) -> Tensor:
    return torch.cat([parameter.detach().reshape(-1).clone() for parameter in policy.parameters])


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_skips_the_step(loop: Loop, poison: float) -> None:
    packed = loop.updater.pack(loop.batch(loop.sample(4)))
    good = UpdateStats()
    loop.step(packed[0], good)
    before, moments = flat(loop.policy), loop.optimizer.state_dict()["state"]
    kept = {k: {name: tensor.clone() for name, tensor in fields.items()} for k, fields in moments.items()}

    bad, weight = UpdateStats(), packed[1][0].weight
    packed[1][0].weight = weight * np.float32(poison)
    loop.step(packed[1], bad)
    packed[1][0].weight = weight
    assert (bad["policy/optimizer_steps"], bad["policy/skipped_steps"], bad["policy/grad_norm"]) == (0, 1, 0.0)
    assert torch.equal(flat(loop.policy), before)
    after = loop.optimizer.state_dict()["state"]
    assert all(torch.equal(after[k][name], tensor) for k, fields in kept.items() for name, tensor in fields.items())
    loop.step(packed[1], bad)
    assert (bad["policy/optimizer_steps"], bad["policy/skipped_steps"]) == (1, 1)
    assert torch.isfinite(flat(loop.policy)).all()
    assert not torch.equal(flat(loop.policy), before)


# --- the KL penalty and the entropy bonus


def fixed_batch(folder: Path, advantage: float) -> UpdateBatch:
    rng = np.random.default_rng(7)
    image = picture(rng, 64, 32)
    members = [
        conversation(text_side(folder), rng, [image, "What?"], [4, 3], [["Again", picture(rng)]]) for _ in range(3)
    ]
    return batch_of([[train_sample(member, advantage, 0.1) for member in members]])


def kl_setup(folder: Path, estimator: str, scale: float, **dotted: Any) -> tuple[PolicyModel, Any]:
    settings = {"algorithm__kl_coef": 0.5, "algorithm__kl_estimator": estimator, **dotted}
    policy = adapted_policy(folder, scale=scale, **settings)
    return policy, PolicyUpdater(policy, run_config(folder, **settings))


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_reference_of_the_kl_penalty_is_the_model_without_its_adapter(tiny_folder: Path, estimator: str) -> None:
    policy, updater = kl_setup(tiny_folder, estimator, scale=0.2)
    batch, stats, expected = fixed_batch(tiny_folder, advantage=0.0), UpdateStats(), 0.0
    (packed,) = updater.pack(batch)
    loss = sum(updater.loss(micro, stats) for micro in packed)
    base = plain_model(tiny_folder)
    for trajectory in batch.minibatches[0].groups[0]:
        mask = torch.from_numpy(trajectory.loss_mask[1:])
        with torch.no_grad():
            new, reference = (
                reference_logprobs(tiny_folder, model, trajectory.token_ids, trajectory.images)[mask]
                for model in (policy.model, base)
            )
        gap = (new - reference).double()
        expected += float({"k2": gap**2 / 2, "k3": torch.exp(-gap) - 1 + gap}[estimator].sum())
    assert abs(expected) > 1
    assert stats["policy/kl"] == pytest.approx(expected, rel=1e-4)
    assert float(loss.detach()) == pytest.approx(0.1 * 0.5 * expected, rel=1e-4)


# --- small parts


def test_statistics_of_several_learners_add_up() -> None:
    names = ("policy/loss", "policy/clip_fraction", "policy/entropy", "policy/ratio_max", "policy/kl", "tokens")
    one = UpdateStats(zip(names, (1.0, 2, 5, 1.5, 1.0, 10), strict=True))
    two = UpdateStats(zip(names, (0.5, 0, 15, 1.2, 3.0, 30), strict=True))
    for part in (one, two):
        part.add({"policy/grad_norm": 3.0, "policy/optimizer_steps": 2})
    figures = UpdateStats.merge([one, two]).metrics()
    assert figures["policy/loss"] == pytest.approx(0.75)  # per step
    assert figures["policy/clip_fraction"] == pytest.approx(2 / 40)
    assert figures["policy/entropy"] == pytest.approx(0.5)
    assert figures["policy/kl"] == pytest.approx(0.1)
    assert figures["policy/ratio_max"] == 1.5
    assert figures["policy/grad_norm"] == pytest.approx(
        1.5
    )  # the norm is of the summed gradient: equal on all learners
    assert figures["policy/optimizer_steps"] == 2


def test_the_learning_rate_falls_linearly_and_then_stays() -> None:
    learner = LearnerSection(lr_schedule="linear", lr_final_fraction=0.1)
    assert [lr_factor(learner, k, 10) for k in (0, 5, 10, 20)] == pytest.approx([1.0, 0.55, 0.1, 0.1])
    assert lr_factor(learner, 3, 0) == 0.1 and lr_factor(LearnerSection(), 5, 10) == 1.0
