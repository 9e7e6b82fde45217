"""Policy-gradient losses per sampled token, and how they are averaged.

Shapes: N sampled tokens of one micro-batch, flattened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rl_vlm.config import AlgorithmSection

# How token losses become one number: the mean of each sequence's mean; the mean over all tokens; the sum over a
# constant (Dr. GRPO).
Aggregation = Literal["sequence_mean", "token_mean", "constant"]
KLEstimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Per token: `loss` float32 [N] with a gradient; `ratio` and `clipped` (bool) for the metrics."""

    loss: Tensor
    ratio: Tensor
    clipped: Tensor


TokenLoss = Callable[[Tensor, Tensor, Tensor, AlgorithmSection], LossTerms]
_LOSSES: dict[str, tuple[TokenLoss, Aggregation]] = {}


def register_loss(name: str, aggregation: Aggregation) -> Callable[[TokenLoss], TokenLoss]:
    """Make a token loss known under a name that `algorithm.loss` can choose."""

    def remember(function: TokenLoss) -> TokenLoss:
        _LOSSES[name] = (function, aggregation)
        return function

    return remember


def get_loss(name: str) -> tuple[TokenLoss, Aggregation]:
    """The token loss and its aggregation."""
    return _LOSSES[name]


def loss_names() -> tuple[str, ...]:
    """All names that `algorithm.loss` accepts."""
    return tuple(sorted(_LOSSES))


@register_loss("grpo", "sequence_mean")
@register_loss("dapo", "token_mean")
@register_loss("dr_grpo", "constant")
def clipped_surrogate(new: Tensor, old: Tensor, advantage: Tensor, algorithm: AlgorithmSection) -> LossTerms:
    """-min(r·A, clip(r, 1 - clip_low, 1 + clip_high)·A) with r = exp(new - old).

    PPO's surrogate (arXiv 1707.06347, equation 7) with separate bounds, "clip-higher" (DAPO, arXiv 2503.14476,
    equation 10). new, old, advantage: float32 [N].
    """
    ratio = (new - old).exp()
    bounded = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
    loss = -torch.minimum(ratio * advantage, bounded * advantage)
    clipped = (bounded * advantage) < (ratio * advantage)
    return LossTerms(loss, ratio, clipped)


def truncated_importance_weights(old: Tensor, behaviour: Tensor, cap: float | None) -> Tensor:
    """min(exp(old - behaviour), cap) per token, without a gradient; all ones when `cap` is None.

    Corrects the mismatch between the engine that sampled and the learner that differentiates (Yao et al., 2025,
    "Your efficient RL framework secretly brings you off-policy RL training").
    """
    if cap is None:
        return torch.ones_like(old)
    return (old - behaviour).exp().clamp(max=cap).detach()


def kl_estimate(new: Tensor, reference: Tensor, estimator: KLEstimator) -> Tensor:
    """Per-token estimate of KL(new || reference) from samples of `new` (Schulman, 2020, "Approximating KL divergence")."""
    difference = reference - new
    if estimator == "k1":
        return -difference
    if estimator == "k2":
        return 0.5 * difference**2
    return difference.exp() - 1 - difference
