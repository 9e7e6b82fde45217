"""Weights that correct the mismatch between the engine that sampled and the learner that differentiates.

The ratio exp(old - behaviour) of a token says how much likelier the learner finds it than the engine did. Both would be
1 with equal arithmetic and equal weights (Yao et al., 2025, "Your efficient RL framework secretly brings you off-policy RL
training").
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_vlm.config.algorithm import AlgorithmSection


def mismatch_weights(
    old: Tensor, behaviour: Tensor, sample: Tensor, settings: AlgorithmSection
) -> tuple[Tensor, Tensor]:
    """The weight float32 [N] of each token's loss, without a gradient, and which tokens are masked, bool [N].

    `sample` int64 [N] is the trajectory of each token. `settings.mismatch`: "truncate" caps the ratio at `tis_cap`; "mask"
    keeps the ratio within the bounds and puts 0 outside (IcePop, arXiv 2510.18855); "sequence_mask" puts 0 on all tokens
    of a trajectory whose geometric mean of ratios is outside and caps the others' at `tis_cap`; "none" gives ones.
    """
    nothing = torch.zeros_like(old, dtype=torch.bool)
    if settings.mismatch == "none":
        return torch.ones_like(old), nothing
    if settings.mismatch == "truncate":
        return truncated_importance_weights(old, behaviour, settings.tis_cap), nothing
    gap = (old - behaviour).detach()
    low, high = settings.mismatch_bounds
    if settings.mismatch == "mask":
        weights = compared = gap.exp()
    else:
        weights, compared = (
            truncated_importance_weights(old, behaviour, settings.tis_cap),
            sample_means(gap, sample).exp(),
        )
    masked = (compared < low) | (compared > high)
    return weights.masked_fill(masked, 0.0), masked


def truncated_importance_weights(old: Tensor, behaviour: Tensor, cap: float | None) -> Tensor:
    """min(exp(old - behaviour), cap) per token, without a gradient; all ones when `cap` is None."""
    if cap is None:
        return torch.ones_like(old)
    return (old - behaviour).exp().clamp(max=cap).detach()


def sample_means(values: Tensor, sample: Tensor) -> Tensor:
    """The mean of `values` [N] over each token's own trajectory, [N]; `sample` int64 [N] says which that is."""
    num_samples = int(sample.max()) + 1
    sums = torch.zeros(num_samples, dtype=values.dtype, device=values.device).index_add(0, sample, values)
    return (sums / torch.bincount(sample, minlength=num_samples))[sample]
