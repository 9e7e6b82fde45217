"""Policy-gradient losses per sampled token. Users register more.

Shapes: N sampled tokens of one micro-batch, flattened. A micro-batch holds whole trajectories only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rl_vlm.config.learner import AlgorithmSection
from rl_vlm.registry import Registry


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


# Policy-gradient losses per sampled token. Users register more.
#
# Shapes: N sampled tokens of one micro-batch, flattened. A micro-batch holds whole trajectories only.


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """What a loss sees of N sampled tokens.

    new, old, behaviour: float32 [N], log-probabilities under the policy that learns, the policy before the first step
    of this update, and the engine that sampled. advantage: float32 [N]. sample, turn: int64 [N], which trajectory of
    the micro-batch (from 0) and which turn of it (from 0) a token belongs to.
    """

    new: Tensor
    old: Tensor
    behaviour: Tensor
    advantage: Tensor
    sample: Tensor
    turn: Tensor


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
    """The clipped surrogate with one ratio per trajectory: the geometric mean of its tokens' ratios.

    GSPO-token (arXiv 2507.18071, equations 7 and 14): the value of the ratio is the sequence's, its gradient flows
    through each token.
    """
    change = tokens.new - tokens.old
    mean = sample_means(change.detach(), tokens.sample)
    # mean + change - change.detach() is written in this order so that the first ratio is exactly 1.
    return clipped_surrogate(
        TokenBatch(
            mean + (change - change.detach()),
            torch.zeros_like(change),
            tokens.behaviour,
            tokens.advantage,
            tokens.sample,
            tokens.turn,
        ),
        settings,
    )


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

    Soft Adaptive Policy Optimization (arXiv 2511.20347); τ is `sapo_tau_pos` for A > 0, else
    `sapo_tau_neg`. Nothing is clipped.
    """
    ratio = (tokens.new - tokens.old).exp()
    tau = torch.where(tokens.advantage > 0, settings.sapo_tau_pos, settings.sapo_tau_neg)
    gate = torch.sigmoid(tau * (ratio - 1)) * 4 / tau
    return LossTerms(-gate * tokens.advantage, ratio, torch.zeros_like(ratio, dtype=torch.bool))


def kl_estimate(new: Tensor, reference: Tensor, estimator: Literal["k2", "k3"]) -> Tensor:
    """Per-token estimate of KL(new || reference) from samples of `new` (Schulman, 2020, "Approximating KL divergence").

    k1 is missing on purpose: on-policy, the expected gradient of `new - reference` as a loss term is zero.
    """
    difference = reference - new
    if estimator == "k2":
        return 0.5 * difference**2
    return difference.exp() - 1 - difference
