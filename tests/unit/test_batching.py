"""Packing: samples that share a row compute what they would compute alone, in every shape of conversation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from core_support import (
    Sample,
    adapted_policy,
    batch_of,
    builder_of,
    conversation,
    picture,
    reference_logprobs,
    train_sample,
)
from torch import Tensor

from rl_vlm.config.learner import AlgorithmSection
from rl_vlm.learning.batching import BatchBuilder, MicroBatch
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.learning.strategies import gradient_vector
from rl_vlm.learning.update import PolicyUpdater
from rl_vlm.models.loading import TextSide
from rl_vlm.types import Trajectory

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def policy(tiny_folder: Path) -> PolicyModel:
    return adapted_policy(tiny_folder)


def group_of(trajectories: Sequence[Trajectory], rng: np.random.Generator) -> list[Sample]:
    return [train_sample(trajectory, float(rng.normal()), float(rng.uniform(0.1, 1))) for trajectory in trajectories]


def various_groups(text: TextSide) -> list[list[Sample]]:
    """Three groups: images in prompt and later turns, unequal numbers of turns and lengths; text alone; one sample."""
    rng = np.random.default_rng(0)
    first, second, third = picture(rng, 96, 64), picture(rng), picture(rng, 64, 64)
    prompt = ["Look:", first, "What is it? " * 3]
    many = [
        conversation(text, rng, prompt, [5], name="a0"),
        conversation(text, rng, prompt, [1, 7], [[second, "again"]], name="a1"),
        conversation(text, rng, prompt, [9, 2, 4], [["no"], [third, "and", second]], name="a2"),
        conversation(text, rng, prompt, [3, 3], [["once more"]], name="a3"),
        conversation(text, rng, prompt, [2, 1], [[third]], name="a4"),
    ]
    plain = [conversation(text, rng, ["A question about nothing. " * 4], [k + 1], name=f"b{k}") for k in range(3)]
    single = [conversation(text, rng, [second, first, "both?"], [4, 4], [["so?"]], name="c0")]
    return [group_of(group, rng) for group in (many, plain, single)]


def outcome(
    policy: PolicyModel, builder: BatchBuilder, groups: list[list[Sample]]
) -> tuple[dict[bytes, Tensor], Tensor]:
    """Log-probabilities by sample, and the LoRA gradient of a loss over all of them."""
    updater = PolicyUpdater(policy.backbone, builder, AlgorithmSection(tis_cap=None), temperature=TEMPERATURE)
    policy.model.zero_grad(set_to_none=True)
    found: dict[bytes, Tensor] = {}
    for micro in updater.pack(batch_of(groups))[0]:
        logprobs, _ = updater.logprobs(micro)
        weights = torch.from_numpy(micro.advantage * micro.weight)
        (logprobs * weights).sum().backward()
        start = 0
        for number in range(len(logprobs)):
            # The behaviour log-probabilities are random: they tell samples apart.
            if number + 1 == len(logprobs) or micro.weight[number + 1] != micro.weight[start]:
                found[micro.behaviour[start : number + 1].tobytes()] = logprobs[start : number + 1].detach()
                start = number + 1
    return found, gradient_vector(policy.parameters)


def key(sample: Sample) -> bytes:
    return sample.trajectory.logprobs[sample.trajectory.loss_mask].tobytes()


def built(builder: BatchBuilder, groups: list[list[Sample]]) -> list[MicroBatch]:
    return builder.build([[sample.trajectory for sample in group] for group in groups])


def rows(batches: list[MicroBatch]) -> int:
    return sum(len(micro.input_ids) for micro in batches)


@pytest.mark.parametrize("max_tokens", [1, 150, 400, 100_000])
def test_packed_and_separate_rows_agree(policy: PolicyModel, text: TextSide, max_tokens: int) -> None:
    groups = various_groups(text)
    expected, expected_gradient = outcome(policy, builder_of(text, 1, share_prompts=False), groups)
    found, gradient = outcome(policy, builder_of(text, max_tokens), groups)
    assert len(expected) == 9
    assert found.keys() == expected.keys()
    for name, logprobs in found.items():
        assert torch.allclose(logprobs, expected[name], rtol=0, atol=1e-5)
    assert torch.allclose(gradient, expected_gradient, rtol=1e-4, atol=1e-5)
    assert expected_gradient.abs().max() > 0.1


def test_packed_rows_equal_transformers_own_forward_pass(
    tiny_folder: Path, policy: PolicyModel, text: TextSide
) -> None:
    groups = various_groups(text)
    builder = builder_of(text)
    assert rows(built(builder, groups)) == 3  # everything is packed
    found, gradient = outcome(policy, builder, groups)
    policy.model.zero_grad(set_to_none=True)
    for sample in (sample for group in groups for sample in group):
        trajectory = sample.trajectory
        logprobs = reference_logprobs(tiny_folder, policy.model, trajectory.token_ids, trajectory.images, TEMPERATURE)
        logprobs = logprobs[torch.from_numpy(trajectory.loss_mask[1:])]
        assert torch.allclose(found[key(sample)], logprobs.detach(), rtol=0, atol=1e-5)
        (logprobs.sum() * float(sample.advantage[0]) * sample.weight).backward()
    assert torch.allclose(gradient, gradient_vector(policy.parameters), rtol=1e-4, atol=1e-5)


def test_every_sampled_token_appears_once_with_its_own_numbers(text: TextSide) -> None:
    groups = various_groups(text)
    batches = built(builder_of(text), groups)
    targets = np.concatenate([micro.target for micro in batches])
    wanted = [sample.trajectory.token_ids[sample.trajectory.loss_mask] for group in groups for sample in group]
    assert sorted(targets.tolist()) == sorted(np.concatenate(wanted).tolist())
    for micro in batches:
        assert len(micro.row) == len(micro.column) == len(micro.target) == len(micro.behaviour) == len(micro.turn)
        assert micro.input_ids.shape == micro.segments.shape == micro.position_ids.shape[1:]
        placeholders = (micro.input_ids == text.codec.image_token_id).sum()
        assert placeholders == sum(text.images.count_tokens(image.width, image.height) for image in micro.images)


def test_groups_whose_prompts_differ_are_not_packed(text: TextSide) -> None:
    rng = np.random.default_rng(1)
    image = picture(rng)
    same = [conversation(text, rng, [image, "What is this? " * 4], [3]) for _ in range(2)]
    other_words = [conversation(text, rng, [image, f"What is {word}? " * 4], [3]) for word in ("this", "that")]
    longer = [conversation(text, rng, [image, "What is this? " * count], [3]) for count in (4, 5)]
    builder = builder_of(text)
    assert rows(builder.build([same])) == 1
    assert rows(builder.build([other_words])) == 2
    assert rows(builder.build([longer])) == 2


def test_groups_whose_first_images_differ_are_not_packed(text: TextSide) -> None:
    """The token ids are the same; only the pixels differ."""
    rng = np.random.default_rng(2)
    shared = picture(rng)
    for images in ([picture(rng), picture(rng)], [shared, shared]):
        members = [conversation(text, rng, [image, shared, "What is this? " * 4], [3]) for image in images]
        assert np.array_equal(members[0].token_ids[:20], members[1].token_ids[:20])
        expected = 1 if images[0] is images[1] else 2
        assert rows(builder_of(text).build([members])) == expected


def test_the_budget_bounds_padded_tokens(text: TextSide) -> None:
    rng = np.random.default_rng(4)
    groups = [
        [conversation(text, rng, ["x" * int(rng.integers(1, 80))], [int(rng.integers(1, 30))])] for _ in range(40)
    ]
    for budget in (100, 300, 1000):
        batches = builder_of(text, budget).build(groups)
        assert rows(batches) == 40
        assert len(batches) > 1
        for micro in batches:
            assert micro.input_ids.size <= budget or len(micro.input_ids) == 1
        lengths = [(micro.segments >= 0).sum(1) for micro in batches]
        # Sorted by length, so that little is padding.
        assert np.all(np.diff(np.concatenate(lengths)) >= 0)


def test_a_group_is_packed_only_where_that_is_cheaper(text: TextSide) -> None:
    """Long answers after a short prompt would pay attention over each other for nothing."""
    rng = np.random.default_rng(6)
    members = [conversation(text, rng, ["hi"], [60]) for _ in range(8)]
    assert rows(builder_of(text).build([members])) == 8
