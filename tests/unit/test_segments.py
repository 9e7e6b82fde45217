"""Attention by segments equals the dense mask: in the function alone, and in the model over random groups, images and turns."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from core_support import Sample, adapted_policy, batch_of, builder_of, conversation, picture, train_sample
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rl_vlm.config.learner import AlgorithmSection
from rl_vlm.learning.batching import BatchBuilder
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.learning.strategies import gradient_vector
from rl_vlm.learning.update import PolicyUpdater
from rl_vlm.models.loading import TextSide
from rl_vlm.models.qwen_vl import SegmentLayout, dense_mask, segment_attention


def packed(rows: list[list[int]]) -> np.ndarray:
    """segments [B, L] of rows given as the lengths of prompt and continuations."""
    parts = [np.repeat(np.arange(len(lengths)), lengths) for lengths in rows]
    segments = np.full((len(rows), max(map(len, parts))), -1, dtype=np.int16)
    for number, part in enumerate(parts):
        segments[number, : len(part)] = part
    return segments


def test_the_layout_of_a_row_by_hand() -> None:
    layout = SegmentLayout.of(packed([[2, 1, 2], [3, 2], [1, 1, 1, 1]]))
    found = [(one.row, one.prompt, one.start, one.stop) for one in layout.later]
    assert found == [(0, 2, 3, 5), (2, 1, 2, 3), (2, 1, 3, 4)]
    assert layout.mask_of(layout.later[0]).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert layout.mask_of(layout.later[2]).int().tolist() == [[1, 1]]


def test_segments_are_used_where_they_save_more_than_their_calls_cost() -> None:
    """A row of 2 + 1 + 2 tokens: 25 pairs densely, 9 for prompt and first answer, 2 x 4 for the second."""
    layout = SegmentLayout.of(packed([[2, 1, 2], [3, 2]]))
    assert layout.pays(5, call_cost=8)
    assert not layout.pays(5, call_cost=9)
    assert SegmentLayout.of(packed([[2, 3], [1, 1]])).pays(5, call_cost=10**9)  # nothing but one causal call


lengths = st.tuples(st.integers(1, 6), st.lists(st.integers(1, 5), min_size=1, max_size=4)).map(lambda x: [x[0], *x[1]])


@settings(max_examples=60, deadline=None)
@given(st.lists(lengths, min_size=1, max_size=4), st.integers(0, 2**31 - 1))
def test_values_and_gradients_equal_the_dense_mask(rows: list[list[int]], seed: int) -> None:
    """In float64, with two query heads per key head."""
    segments = packed(rows)
    generator = torch.Generator().manual_seed(seed)
    shapes = [(len(rows), heads, segments.shape[1], 8) for heads in (4, 2, 2)]
    sides = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    module: Any = SimpleNamespace(num_key_value_groups=2, is_causal=True)
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


@pytest.fixture(scope="module")
def policies(tiny_folder: Path) -> list[PolicyModel]:
    return [adapted_policy(tiny_folder, learner__attention=attention) for attention in ("segments", "dense")]


@st.composite
def groups(draw: Any, text: TextSide) -> list[list[Sample]]:
    """Groups whose samples share a prompt with images or without, with turns and images of their own."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = st.sampled_from([(32, 32), (96, 64), (64, 96)])
    images = [picture(rng, *draw(sizes)) for _ in range(3)]
    found = []
    for number in range(draw(st.integers(1, 3))):
        prompt = [*images[: draw(st.integers(0, 2))], "What is it? " * draw(st.integers(1, 5))]
        members = []
        for member in range(draw(st.integers(1, 4))):
            replies = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
            later = [["again", *images[2 : 2 + draw(st.integers(0, 1))]] for _ in replies[1:]]
            trajectory = conversation(text, rng, prompt, replies, later, name=f"{number}-{member}")
            members.append(train_sample(trajectory, float(rng.normal()), float(rng.uniform(0.1, 1))))
        found.append(members)
    return found


def outcome(policy: PolicyModel, builder: BatchBuilder, samples: list[list[Sample]]) -> tuple[list[Tensor], Tensor]:
    updater = PolicyUpdater(policy.backbone, builder, AlgorithmSection(tis_cap=None), temperature=0.7)
    policy.model.zero_grad(set_to_none=True)
    found = []
    for micro in updater.pack(batch_of(samples))[0]:
        logprobs, _ = updater.logprobs(micro)
        (logprobs * torch.from_numpy(micro.advantage * micro.weight)).sum().backward()
        found.append(logprobs.detach())
    return found, gradient_vector(policy.parameters)


@settings(max_examples=12, deadline=None)
@given(st.data(), st.sampled_from([200, 4096]))
def test_a_model_computes_the_same_over_random_groups_images_and_turns(
    policies: list[PolicyModel], text: TextSide, data: Any, max_tokens: int
) -> None:
    samples = data.draw(groups(text))
    builder = builder_of(text, max_tokens)
    (ours, gradient), (expected, wanted) = (outcome(policy, builder, samples) for policy in policies)
    for one, other in zip(ours, expected, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-5)
    # Against the whole gradient: an entry is a sum of up to a thousand terms, and rounds as they do.
    assert (gradient - wanted).norm() <= 1e-5 * wanted.norm()


def test_no_call_gets_a_mask_over_a_whole_row(
    policies: list[PolicyModel], text: TextSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight answers after one prompt: the largest mask covers one answer and what it sees."""
    rng = np.random.default_rng(0)
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
    updater = PolicyUpdater(policies[0].backbone, builder, AlgorithmSection(), temperature=1.0)
    updater.logprobs(micro)
    prompt = int((micro.segments == 0).sum())
    text_config = policies[0].model.config.text_config
    groups = text_config.num_attention_heads // text_config.num_key_value_heads
    assert max(masks) == groups * 13 * (prompt + 13)
    assert len(masks) == 8 * len(policies[0].model.model.language_model.layers)
