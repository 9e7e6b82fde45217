"""Policy-gradient losses per sampled token. Users register more.

Shapes: N sampled tokens of one micro-batch, flattened. A micro-batch holds whole segments only: whole trajectories,
unless `rollout.history` rewrites what turns show."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from rl_vlm.config.learner import AlgorithmSection
from rl_vlm.registry import Registry


def mismatch_weights(
    old: Tensor, behaviour: Tensor, sample: Tensor, settings: AlgorithmSection
) -> tuple[Tensor, Tensor]:
    """The weight float32 [N] of each token's loss, without a gradient, and which tokens are masked, bool [N].

    `sample` int64 [N] is the segment of each token. `settings.mismatch`: "truncate" caps the ratio at `tis_cap`;
    "mask" keeps the ratio within the bounds and puts 0 outside (IcePop, arXiv 2510.18855); "sequence_mask" caps it, and
    puts 0 on segments whose geometric mean of ratios is outside; "none" gives ones.
    """
    gap, cap = (old - behaviour).detach(), settings.tis_cap
    masked = torch.zeros_like(old, dtype=torch.bool)
    if settings.mismatch in ("mask", "sequence_mask"):
        low, high = settings.mismatch_bounds
        compared = (gap if settings.mismatch == "mask" else sample_means(gap, sample)).exp()
        masked = (compared < low) | (compared > high)
    if settings.mismatch == "mask":
        weights = gap.exp()
    elif settings.mismatch == "none" or cap is None:
        weights = torch.ones_like(old)
    else:
        weights = gap.exp().clamp(max=cap)
    return weights.masked_fill(masked, 0.0), masked


def sample_means(values: Tensor, sample: Tensor) -> Tensor:
    """The mean of `values` [N] over each token's own segment, [N]; `sample` int64 [N] says which that is."""
    num_samples = int(sample.max()) + 1
    sums = torch.zeros(num_samples, dtype=values.dtype, device=values.device).index_add(0, sample, values)
    return (sums / torch.bincount(sample, minlength=num_samples))[sample]


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """What a loss sees of N sampled tokens: float32 [N], `sample` and `turn` int64 [N]."""

    new: Tensor  # log-probabilities under the policy that learns,
    old: Tensor  # under the policy before the first step of this update,
    behaviour: Tensor  # and under the engine that sampled
    advantage: Tensor
    sample: Tensor  # the segment of the micro-batch
    turn: Tensor  # and its turn, both counted from 0


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Per token: `loss` float32 [N] with a gradient; `ratio` and `clipped` (bool) for the metrics."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


Loss = Callable[[TokenBatch, AlgorithmSection], LossTerms]

LOSSES: Registry[Loss] = Registry("algorithm.loss")
register_loss = LOSSES.register


@register_loss("clipped")
def clipped_surrogate(tokens: TokenBatch, settings: AlgorithmSection) -> LossTerms:
    """-min(r·A, clip(r, 1 - clip_low, 1 + clip_high)·A) with r = exp(new - old).

    PPO's surrogate (arXiv 1707.06347, equation 7) with separate bounds, "clip-higher" (DAPO, arXiv 2503.14476,
    equation 10). With `dual_clip` c the objective of a token with A < 0 is at least c·A, so that an unlikely token that
    became likely cannot push without bound (dual clip, arXiv 1912.09729).
    """
    advantage = tokens.advantage
    ratio = (tokens.new - tokens.old).exp()
    bounded = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    objective = torch.minimum(ratio * advantage, bounded * advantage)
    clipped = (bounded * advantage) < (ratio * advantage)
    if settings.dual_clip is not None:
        least = settings.dual_clip * advantage
        too_low = (advantage < 0) & (objective < least)
        objective, clipped = torch.where(too_low, least, objective), clipped | too_low
    return LossTerms(-objective, ratio, clipped)


@register_loss("gspo")
def sequence_surrogate(tokens: TokenBatch, settings: AlgorithmSection) -> LossTerms:
    """The clipped surrogate with one ratio per segment: the geometric mean of its tokens' ratios.

    GSPO-token (arXiv 2507.18071, equations 7 and 14): the value of the ratio is the sequence's, its gradient flows
    through each token.
    """
    change = tokens.new - tokens.old
    mean = sample_means(change.detach(), tokens.sample)
    # In this order the first ratio is exactly 1.
    new = mean + (change - change.detach())
    return clipped_surrogate(replace(tokens, new=new, old=torch.zeros_like(change)), settings)


@register_loss("cispo")
def clipped_importance_weight(tokens: TokenBatch, settings: AlgorithmSection) -> LossTerms:
    """-sg(min(r, cispo_cap))·A·new: REINFORCE with the ratio as a weight, so that every token keeps a gradient.

    CISPO (MiniMax-M1, arXiv 2506.13585). Like the authors, without a lower bound.
    """
    ratio = (tokens.new - tokens.old).exp()
    weight = ratio.clamp(max=settings.cispo_cap).detach()
    return LossTerms(-weight * tokens.advantage * tokens.new, ratio, ratio > settings.cispo_cap)


@register_loss("sapo")
def soft_gate(tokens: TokenBatch, settings: AlgorithmSection) -> LossTerms:
    """-(4/τ)·σ(τ(r - 1))·A, a gate whose slope is 1 at r = 1 and falls off smoothly on both sides.

    SAPO (arXiv 2511.20347); τ is `sapo_tau_pos` for A > 0, else `sapo_tau_neg`. Nothing is clipped.
    """
    ratio = (tokens.new - tokens.old).exp()
    tau = torch.where(tokens.advantage > 0, settings.sapo_tau_pos, settings.sapo_tau_neg)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return LossTerms(-gate * tokens.advantage, ratio, torch.zeros_like(ratio, dtype=torch.bool))


def kl_estimate(new: Tensor, reference: Tensor, estimator: Literal["k2", "k3"]) -> Tensor:
    """Per-token estimate of KL(new || reference) from samples of `new` (Schulman, 2020, "Approximating KL divergence").

    There is no k1: on-policy, the expected gradient of `new - reference` as a loss term is zero.
    """
    difference = reference - new
    if estimator == "k2":
        return 0.5 * difference**2
    return difference.exp() - 1 - difference
