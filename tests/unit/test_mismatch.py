"""What corrects the mismatch between engine and learner: weights by hand, against TRL's, and in the update."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from test_losses import Numbers, ours, settings_of
from torch import Tensor

from rl_vlm.config.learner import AlgorithmSection
from rl_vlm.learning.losses import mismatch_weights, sample_means

RATIOS = [0.2, 0.5, 0.9, 1.0, 1.8, 3.0, 6.0]


def weights_of(
    ratios: list[float], sample: list[int] | None = None, **settings: object
) -> tuple[list[float], list[bool]]:
    """Of tokens whose learner's log-probability is log(ratio) above the engine's."""
    behaviour = torch.full((len(ratios),), -2.0, dtype=torch.float64)
    old = behaviour + torch.tensor(ratios, dtype=torch.float64).log()
    ids = torch.tensor(sample or range(len(ratios)))
    weights, masked = mismatch_weights(old.requires_grad_(), behaviour, ids, AlgorithmSection(**settings))
    assert not weights.requires_grad
    return weights.tolist(), masked.tolist()


def test_none_and_truncation_by_hand() -> None:
    assert weights_of(RATIOS, mismatch="none") == ([1.0] * 7, [False] * 7)
    weights, masked = weights_of(RATIOS)
    assert weights == pytest.approx([min(ratio, 2.0) for ratio in RATIOS])
    assert not any(masked)
    assert weights_of(RATIOS, tis_cap=None)[0] == [1.0] * 7


def test_the_token_mask_is_two_sided_and_keeps_the_ratio_inside() -> None:
    weights, masked = weights_of(RATIOS, mismatch="mask", mismatch_low=0.6, mismatch_high=2.5)
    assert weights == pytest.approx([0, 0, 0.9, 1.0, 1.8, 0, 0])
    assert masked == [True, True, False, False, False, True, True]
    assert weights_of([0.49, 0.51, 4.9, 5.1], mismatch="mask")[0] == pytest.approx([0, 0.51, 4.9, 0])


def test_the_sequence_mask_compares_geometric_means() -> None:
    """Trajectory 0: sqrt(0.5 · 2) = 1, kept; 1: sqrt(1.3 · 1.3) = 1.3, out; 2: a single token at 1.05, kept."""
    ratios, sample = [0.5, 1.3, 2.0, 1.3, 1.05], [0, 1, 0, 1, 2]
    settings = {"mismatch": "sequence_mask", "mismatch_low": 0.9, "mismatch_high": 1.1}
    weights, masked = weights_of(ratios, sample, **settings, tis_cap=1.5)
    assert masked == [False, True, False, True, False]
    assert weights == pytest.approx([0.5, 0, 1.5, 0, 1.05])
    assert weights_of(ratios, sample, **settings, tis_cap=None)[0] == [1.0, 0.0, 1.0, 0.0, 1.0]


def test_the_token_mask_equals_trls_mode_token_mask() -> None:
    """TRL: the ratio, and 0 below vllm_importance_sampling_clip_min or above vllm_importance_sampling_clip_max."""
    rng = np.random.default_rng(0)
    ratios = np.exp(rng.normal(0, 0.5, 1000))
    theirs = torch.tensor(ratios)
    theirs = theirs.masked_fill((theirs < 0.7) | (theirs > 1.6), 0.0)
    weights, masked = weights_of(ratios.tolist(), mismatch="mask", mismatch_low=0.7, mismatch_high=1.6)
    assert weights == pytest.approx(theirs.tolist(), abs=1e-9)
    assert 100 < sum(masked) < 900


def test_means_are_those_of_each_trajectory() -> None:
    values = torch.tensor([1.0, 10.0, 3.0, 30.0, 5.0])
    assert sample_means(values, torch.tensor([0, 1, 0, 1, 2])).tolist() == [2.0, 20.0, 2.0, 20.0, 5.0]


@pytest.mark.parametrize("mismatch", ["mask", "sequence_mask"])
def test_masked_tokens_have_no_gradient_and_are_counted(mismatch: str) -> None:
    numbers = Numbers(seed=5)
    bounds = {"mismatch_low": 0.8, "mismatch_high": 1.25}
    _, gradient, stats = ours(numbers, settings_of("dapo", mismatch=mismatch, **bounds, entropy_coef=1e-9), parts=3)
    gap = torch.tensor(numbers.old - numbers.behaviour)
    mask = torch.tensor(numbers.mask)
    compared = gap.exp() if mismatch == "mask" else ((gap * mask).sum(1) / mask.sum(1)).exp()[:, None].expand_as(gap)
    outside: Tensor = ((compared < 0.8) | (compared > 1.25)) & mask
    assert 0 < outside.sum() < mask.sum()
    assert stats.masked == float(outside.sum())
    assert stats.metrics()["mismatch/masked"] == pytest.approx(float(outside.sum() / mask.sum()))
    assert not gradient[outside].any()
    _, whole, plain = ours(numbers, settings_of("dapo", mismatch="none", entropy_coef=1e-9), parts=3)
    assert plain.metrics()["mismatch/masked"] == 0.0
    inside = ~outside & mask
    weight = gap.exp() if mismatch == "mask" else gap.exp().clamp(max=2.0)
    assert torch.allclose(gradient[inside], (whole * weight)[inside], rtol=1e-4, atol=1e-8)
    assert math.isfinite(float(gradient.sum()))
