"""Packing: samples that share a row compute what they would compute alone, in every shape of conversation."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from core_support import (
    Sample,
    adapted_policy,
    batch_of,
    builder_of,
    conversation,
    gradient_vector,
    picture,
    reference_logprobs,
    train_sample,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_loop import Loop
from torch import Tensor

from rl_vlm.config import parse_config
from rl_vlm.learning.batching import BatchBuilder, MicroBatch, gathered
from rl_vlm.learning.plan import UpdateStats
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.learning.update import PolicyUpdater
from rl_vlm.models import attention
from rl_vlm.models.attention import SegmentLayout, dense_mask, segment_attention
from rl_vlm.models.families import generic, qwen_vl
from rl_vlm.models.families.qwen_vl import ImageProcessorSpec, frame_patches
from rl_vlm.models.images import ReadAhead, TextSide, UnusableImageError
from rl_vlm.types import EncodedImage, StopReason, Trajectory, TrajectoryStatus, Turn

TEMPERATURE = 0.7


@pytest.fixture(scope="module", params=["segments", "dense"])
def policy(request: pytest.FixtureRequest, tiny_folder: Path) -> PolicyModel:
    return adapted_policy(tiny_folder, learner__attention=request.param)


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
) -> tuple[dict[str, np.ndarray], Tensor]:
    """Log-probabilities by trajectory, and the LoRA gradient of a loss over all of them."""
    updater = PolicyUpdater(policy, parse_config({"rollout": {"temperature": TEMPERATURE}}))
    policy.model.zero_grad(set_to_none=True)
    batch, found = batch_of(groups), {}
    for micro in built(builder, groups):
        micro.set_weights(batch.minibatches[0].weights)
        logprobs = updater.logprobs(micro)[0]
        (logprobs * torch.from_numpy(micro.join(batch.advantages) * micro.weight)).sum().backward()
        found |= gathered([(micro, logprobs.detach().numpy())])
    return found, gradient_vector(policy.parameters)


def built(builder: BatchBuilder, groups: list[list[Sample]]) -> list[MicroBatch]:
    return builder.build([[sample.trajectory for sample in group] for group in groups])


def rows(batches: list[MicroBatch]) -> int:
    return sum(len(micro.input_ids) for micro in batches)


@pytest.mark.parametrize("max_tokens", [1, 150, 400, 100_000])
def test_packed_and_separate_rows_agree(policy: PolicyModel, text: TextSide, max_tokens: int) -> None:
    groups = various_groups(text)
    expected, expected_gradient = outcome(policy, builder_of(text, 1, share_prompts=False), groups)
    found, gradient = outcome(policy, builder_of(text, max_tokens), groups)
    assert len(expected) == 9 and found.keys() == expected.keys()
    for name, logprobs in expected.items():
        np.testing.assert_allclose(found[name], logprobs, rtol=0, atol=1e-5)
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
        np.testing.assert_allclose(found[trajectory.trajectory_id], logprobs.detach(), rtol=0, atol=1e-5)
        (logprobs.sum() * float(sample.advantage[0]) * sample.weight).backward()
    assert torch.allclose(gradient, gradient_vector(policy.parameters), rtol=1e-4, atol=1e-5)


def test_groups_whose_prompts_differ_are_not_packed(text: TextSide) -> None:
    rng = np.random.default_rng(1)
    first, second = picture(rng), picture(rng)
    asked = [first, first, "What is this? " * 4]
    # The same twice; other words; a longer text; another first image, whose token ids are the same.
    others = [asked, [first, first, "What is that? " * 4], [first, first, "What is this? " * 5], [second, *asked[1:]]]
    for number, other in enumerate(others):
        members = [conversation(text, rng, parts, [3]) for parts in (asked, other)]
        assert rows(builder_of(text).build([members])) == (2 if number else 1)


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


def trajectory_of(prompt: int, reply: int, name: str) -> Trajectory:
    """Tokens without meaning."""
    ids, mask = np.arange(prompt + reply, dtype=np.int32) % 200, np.arange(prompt + reply) >= prompt
    turns = (Turn(prompt, prompt + reply, 0, StopReason.END_OF_TURN),)
    logprobs = np.zeros(prompt + reply, dtype=np.float32)
    return Trajectory(name, ids, mask, logprobs, turns, TrajectoryStatus.COMPLETED)


@pytest.mark.parametrize(("prompt", "reply", "rows_of_a_group"), [(1176, 1000, 2), (2176, 900, 2), (900, 2000, 3)])
def test_a_group_that_is_too_long_becomes_few_rows_with_the_prompt_each(
    text: TextSide, prompt: int, reply: int, rows_of_a_group: int
) -> None:
    rng = np.random.default_rng(5)
    replies = rng.normal(reply, reply / 8, (8, 8)).astype(int)
    groups = [[trajectory_of(prompt, size, f"{k}.{n}") for n, size in enumerate(row)] for k, row in enumerate(replies)]
    batches = BatchBuilder(text, 8192, width=2048).build(groups)
    best = len(groups) * rows_of_a_group * prompt + replies.sum()
    assert best <= sum(micro.input_ids.size for micro in batches) <= 1.03 * best
    assert all(micro.input_ids.size <= 8192 for micro in batches)
    assert sorted(name for micro in batches for name, _ in micro.parts) == sorted(
        one.trajectory_id for group in groups for one in group
    )


def test_sixteen_bits_on_a_gpu_never_get_a_dense_mask(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There the rows of a group are one call, however short its replies are."""
    backbone = adapted_policy(tiny_folder, learner__attention="auto").backbone
    short = packed([[5, *[3] * 8]])
    assert isinstance(backbone.attention(short), Tensor)
    monkeypatch.setattr(generic, "takes_sequences", lambda *_: True)
    assert isinstance(backbone.attention(short), SegmentLayout)


# --- Attention by segments equals the dense mask: in the function alone, and in the model over random groups, images and turns


def packed(rows: list[list[int]]) -> np.ndarray:
    """segments [B, L] of rows given as the lengths of prompt and continuations."""
    parts = [np.repeat(np.arange(len(lengths)), lengths) for lengths in rows]
    segments = np.full((len(rows), max(map(len, parts))), -1, dtype=np.int16)
    for number, part in enumerate(parts):
        segments[number, : len(part)] = part
    return segments


lengths = st.tuples(st.integers(1, 6), st.lists(st.integers(1, 5), min_size=1, max_size=4)).map(lambda x: [x[0], *x[1]])


def by_sequence(query: Any, key: Any, value: Any, queries: Any, keys: Any, *_: int, scale: float, **__: Any) -> Any:
    """What torch's kernel for sequences of different lengths computes on a GPU: causal at the end of each one's keys."""
    found = []
    for number in range(len(queries) - 1):
        rows, columns = slice(*queries[number : number + 2]), slice(*keys[number : number + 2])
        seen = torch.ones(rows.stop - rows.start, columns.stop - columns.start, dtype=torch.bool)
        sides = (side.transpose(0, 1)[None] for side in (query[rows], key[columns], value[columns]))
        mask = seen.tril(seen.shape[1] - seen.shape[0])
        mixed = torch.nn.functional.scaled_dot_product_attention(*sides, attn_mask=mask, scale=scale, enable_gqa=True)
        found.append(mixed[0].transpose(0, 1))
    return torch.cat(found)


@settings(max_examples=60, deadline=None)
@given(st.lists(lengths, min_size=1, max_size=4), st.integers(0, 2**31 - 1), st.booleans())
def test_values_and_gradients_equal_the_dense_mask(rows: list[list[int]], seed: int, as_on_a_gpu: bool) -> None:
    """In float64, with two query heads per key head; on a GPU the rows are sequences of one call."""
    segments = packed(rows)
    generator = torch.Generator().manual_seed(seed)
    shapes = [(len(rows), heads, segments.shape[1], 8) for heads in (4, 2, 2)]
    sides = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    module: Any = SimpleNamespace(num_key_value_groups=2, is_causal=True)
    with (
        mock.patch.object(attention, "takes_sequences", lambda *_: as_on_a_gpu),
        mock.patch.object(attention, "varlen_attn", by_sequence),
    ):
        ours, _ = segment_attention(module, *sides, None, scaling=0.3, segments=SegmentLayout.of(segments))
    expected, _ = segment_attention(module, *sides, dense_mask(torch.from_numpy(segments)), scaling=0.3)
    assert torch.isfinite(ours).all()
    real = torch.from_numpy(segments >= 0)
    assert torch.allclose(ours[real], expected[real], rtol=0, atol=1e-12)
    weight = torch.randn(ours.shape, generator=generator, dtype=torch.float64) * real[..., None, None]
    for one, other in zip(
        *(torch.autograd.grad((mixed * weight).sum(), sides) for mixed in (ours, expected)), strict=True
    ):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


def test_no_call_gets_a_mask_over_a_whole_row(
    tiny_folder: Path, text: TextSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight answers after one prompt: the largest mask covers one answer and what it sees."""
    policy, rng = adapted_policy(tiny_folder, learner__attention="segments"), np.random.default_rng(0)
    members = [conversation(text, rng, ["What is it? " * 9], [6 + k]) for k in range(8)]
    builder = builder_of(text, 4096)
    (micro,) = builder.build([members])
    assert len(micro.segments) == 1
    masks: list[int] = []
    plain = torch.nn.functional.scaled_dot_product_attention

    def watched(*sides: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Tensor:
        masks.append(0 if attn_mask is None else attn_mask.numel())
        return plain(*sides, attn_mask=attn_mask, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    PolicyUpdater(policy, parse_config({})).logprobs(micro)
    prompt = int((micro.segments == 0).sum())
    text_config = policy.model.config.text_config
    groups = text_config.num_attention_heads // text_config.num_key_value_heads
    assert max(masks) == groups * 13 * (prompt + 13)
    assert len(masks) == 8 * len(policy.model.model.language_model.layers)


# --- Images are decoded while the model computes: the same numbers, one announcement in memory, errors where they belong


SPEC = ImageProcessorSpec(min_pixels=1024)


class Decoder:
    """Notes which thread cuts an image."""

    def __init__(self) -> None:
        self.threads: set[str] = set()

    def __call__(self, spec: ImageProcessorSpec, image: EncodedImage) -> Any:
        self.threads.add(threading.current_thread().name)
        return frame_patches(spec, image)


@pytest.fixture
def decoder(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    decoder = Decoder()
    monkeypatch.setattr(qwen_vl, "frame_patches", decoder)
    return decoder


def test_an_image_that_cannot_be_decoded_is_an_error_where_it_is_read() -> None:
    good = picture(np.random.default_rng(3))
    broken = replace(good, sha256="0" * 64, png=good.png[:-40])
    reader = ReadAhead(SPEC)
    reader.announce([broken, good])
    reader.read([good])
    with pytest.raises(UnusableImageError):
        reader.read([broken])


@pytest.mark.parametrize("tower", [False, True])
def test_an_update_reads_the_next_micro_batchs_images_and_learns_the_same(
    tiny_folder: Path, decoder: Decoder, monkeypatch: pytest.MonkeyPatch, tower: bool
) -> None:
    """With a cache that holds nothing, as features of large models are: every pass decodes."""
    options = {"model__lora__target_modules": "vision"} if tower else {}
    loop = Loop(tiny_folder, 1.0, **options)
    monkeypatch.setattr(loop.policy.backbone, "_cache_bytes", 0)
    groups = loop.sample(6)

    def gradients() -> list[np.ndarray]:
        decoder.threads.clear()
        packed = loop.updater.pack(loop.batch(groups))
        assert sum(map(len, packed)) > 2
        loop.policy.model.zero_grad()
        for micro in (micro for step in packed for micro in step):
            loop.updater.loss(micro, UpdateStats()).backward()
        return [parameter.grad.numpy().copy() for parameter in loop.policy.parameters if parameter.grad is not None]

    with monkeypatch.context() as patch:
        patch.setattr(loop.policy.backbone, "announce_images", lambda images: None)
        alone = gradients()
    assert decoder.threads == {"MainThread"}
    for one, two in zip(alone, gradients(), strict=True):
        assert np.array_equal(one, two)
    assert "read-ahead_0" in decoder.threads
    loop.close()
