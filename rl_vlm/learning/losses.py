"""Policy-gradient losses per sampled token. Users register more.

Shapes: N sampled tokens of one micro-batch, flattened. A micro-batch holds whole trajectories only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from rl_vlm.config.learner import AlgorithmSection
from rl_vlm.learning.sizes import HEAD_TILES
from rl_vlm.models.kernels import linear, wide_product
from rl_vlm.registry import Registry

if TYPE_CHECKING:
    from rl_vlm.models.families.generic import Backbone


def mismatch_weights(
    old: Tensor, behaviour: Tensor, sample: Tensor, settings: AlgorithmSection
) -> tuple[Tensor, Tensor]:
    """The weight float32 [N] of each token's loss, without a gradient, and which tokens are masked, bool [N].

    `sample` int64 [N] is the trajectory of each token. `settings.mismatch`: "truncate" caps the ratio at `tis_cap`;
    "mask" keeps the ratio within the bounds and puts 0 outside (IcePop, arXiv 2510.18855); "sequence_mask" caps it, and
    puts 0 on trajectories whose geometric mean of ratios is outside; "none" gives ones.
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
    """The mean of `values` [N] over each token's own trajectory, [N]; `sample` int64 [N] says which that is."""
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
    sample: Tensor  # the trajectory of the micro-batch
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
    """The clipped surrogate with one ratio per trajectory: the geometric mean of its tokens' ratios.

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


# Log-probabilities of given tokens, with a gradient that is written out: no logits of all positions are in memory.

# What is wanted of the entropies: nothing, their values, or values with a gradient.
Entropy: TypeAlias = Literal["none", "value", "gradient"]


_CAPPED_ROWS = 512  # whose logits exist at once where they are capped


class Allowed(NamedTuple):
    """The tokens that a grammar allows at N positions, of which many have the same."""

    masks: Tensor  # uint8 [U, V / 8], a bit per token
    place: Tensor  # int64 [N]: the mask of each position

    def of(self, rows: slice) -> Allowed:
        used, place = self.place[rows].unique(return_inverse=True)
        return Allowed(self.masks[used], place)

    def restrict(self, logits: Tensor, columns: slice) -> Tensor:
        """Set all others to -inf in these columns of the vocabulary, [N, columns]; in place."""
        start = columns.start // 8
        packed = self.masks[:, start : -(-columns.stop // 8), None]
        bits = packed >> torch.arange(8, dtype=torch.uint8, device=packed.device) & 1
        first = columns.start - 8 * start
        forbidden = bits.flatten(1)[:, first : first + logits.shape[1]] == 0
        return logits.masked_fill_(forbidden[self.place], float("-inf"))


class Tile(NamedTuple):
    """How many logits exist at once: positions × vocabulary entries."""

    rows: int
    columns: int


def token_logprobs(
    backbone: Backbone,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    entropy: Entropy = "gradient",
    tile: Tile | None = None,
    allowed: Allowed | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities float32 [N] of `targets` int64 [N] from hidden states [N, D], and the entropies [N] where asked
    for.

    The token mask, what a grammar has `allowed` and the temperature are the engine's. `tile`: None takes what suits the
    device.
    """
    if backbone.softcap is not None:
        slices = (slice(start, start + _CAPPED_ROWS) for start in range(0, len(hidden), _CAPPED_ROWS))
        chunks = ((hidden[rows], targets[rows], allowed and allowed.of(rows)) for rows in slices)
        parts = [checkpoint(_capped, backbone, *chunk, temperature, use_reentrant=False) for chunk in chunks]
        logprobs, entropies = (torch.cat(both) for both in zip(*parts, strict=True))
        return logprobs, None if entropy == "none" else entropies if entropy == "gradient" else entropies.detach()
    tile = tile or Tile(*HEAD_TILES["cpu" if hidden.device.type == "cpu" else "cuda"])
    head = _Head(backbone.wide_head, backbone.token_bias, temperature, tile, allowed)
    return _TokenLogprobs.apply(hidden, backbone.lm_head.weight, targets, head, entropy)  # type: ignore[no-any-return]


def _capped(
    backbone: Backbone, hidden: Tensor, targets: Tensor, allowed: Allowed | None, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probabilities and entropies [N] by autograd, for heads whose logits are no product."""
    logits = backbone.logits(hidden) / temperature
    if allowed is not None:
        logits = allowed.restrict(logits, slice(0, logits.shape[1]))
    logprobs = torch.log_softmax(logits, dim=-1)
    known = logprobs.masked_fill(logprobs == -torch.inf, 0.0)
    return logprobs.gather(1, targets[:, None])[:, 0], -(logprobs.exp() * known).sum(1)


class _Head(NamedTuple):
    """Logits z = (hidden · weightᵀ + bias) / temperature, tile by tile; float32 or wider."""

    wide: bool  # not rounded to the model's type
    bias: Tensor
    temperature: float
    tile: Tile
    allowed: Allowed | None

    def of(self, rows: slice) -> _Head:
        return self if self.allowed is None else self._replace(allowed=self.allowed.of(rows))

    def rows(self, count: int) -> Iterator[slice]:
        return (slice(start, start + self.tile.rows) for start in range(0, count, self.tile.rows))

    def columns(self) -> Iterator[slice]:
        return (slice(start, start + self.tile.columns) for start in range(0, len(self.bias), self.tile.columns))

    def logits(self, hidden: Tensor, weight: Tensor, columns: slice) -> Tensor:
        """[rows, columns], not shared with anything."""
        bias = self.bias[columns]
        if self.wide:
            logits = wide_product(hidden, weight[columns]).add_(bias)
        elif hidden.dtype == bias.dtype:
            logits = linear(hidden, weight[columns], bias)
        else:  # as Backbone.logits: rounded to the model's type first
            logits = linear(hidden, weight[columns]).to(torch.promote_types(hidden.dtype, bias.dtype))
            logits += bias
        if self.allowed is not None:
            self.allowed.restrict(logits, columns)
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def back(self, masses: Tensor, weight: Tensor, columns: slice) -> Tensor:
        """masses [rows, columns] · weight: [rows, D]."""
        return linear(masses.to(weight.dtype), weight[columns].t())


def _over_vocabulary(
    hidden: Tensor, weight: Tensor, targets: Tensor, head: _Head, with_slope: bool, entropy: Entropy
) -> list[Tensor]:
    """For some rows: the target's logit, log Σ e^z, the entropy where it is wanted, and `with_slope` the derivatives
    [rows, D] of log-probability and entropy.

    Sums over the vocabulary with the largest logit t so far, as online softmax has them (arXiv 1805.02867): mass
    Σ e^(z-t), moment Σ e^(z-t) (z-t), mean Σ e^(z-t) w, tilt Σ e^(z-t) (z-t) w. A larger t rescales them all.
    """
    measured, tilted = entropy != "none", with_slope and entropy == "gradient"
    kind = torch.promote_types(hidden.dtype, torch.float32)
    mass = hidden.new_zeros(len(hidden), dtype=kind)
    top = torch.full_like(mass, -1e30)  # finite, so that a tile of suppressed tokens alone gives no inf - inf
    chosen, moment = mass.clone(), mass.clone()
    mean, tilt = (hidden.new_zeros(hidden.shape if wanted else 0, dtype=kind) for wanted in (with_slope, tilted))
    for columns in head.columns():
        logits = head.logits(hidden, weight, columns)
        place, inside = _within(targets, columns)
        chosen = torch.where(inside, logits.gather(1, place)[:, 0], chosen)
        before, top = top, torch.maximum(top, logits.amax(1))
        fall = before - top
        factor = fall.exp()
        logits.sub_(top[:, None])
        masses = logits.exp() if measured else logits.exp_()
        if measured:
            weighted = logits.clamp_(min=-1e4).mul_(masses)  # 0 · -inf of a suppressed token is 0 here
            moment = factor * (moment + fall * mass) + weighted.sum(1)
            if tilted:
                tilt.add_(fall[:, None] * mean).mul_(factor[:, None]).add_(head.back(weighted, weight, columns))
        if with_slope:
            mean.mul_(factor[:, None]).add_(head.back(masses, weight, columns))
        mass = factor * mass + masses.sum(1)
    found = [chosen, top + mass.log()]
    if measured:
        found.append(mass.log() - moment / mass)
    if with_slope:
        found.append((weight[targets] - mean / mass[:, None]) / head.temperature)
    if tilted:
        found.append((tilt - (moment / mass)[:, None] * mean) / (-head.temperature * mass[:, None]))
    return found


def _within(targets: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """(places [rows, 1] of the targets in a tile, bool [rows]: whether they are there)."""
    place = targets - columns.start
    inside = (place >= 0) & (targets < columns.stop)
    return torch.where(inside, place, 0)[:, None], inside


class _TokenLogprobs(torch.autograd.Function):
    """What the derivatives in a hidden state h sum over the vocabulary does not depend on the loss:

        d logp / dh = (w_target - Σ p_v w_v) / T        dH / dh = -Σ p_v (log p_v + H) w_v / T

    So the forward pass adds it up while it has the logits, and the backward pass only scales: two products instead of
    three. Weights that are trained take a third: the backward pass recomputes a tile's logits and makes of them, in
    place, softmax minus one-hot, scaled.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, head: _Head, entropy: Entropy
    ) -> tuple[Tensor, Tensor | None]:
        slope = ctx.needs_input_grad[0]
        rows = head.rows(len(hidden))
        parts = [_over_vocabulary(hidden[part], weight, targets[part], head.of(part), slope, entropy) for part in rows]
        chosen, log_sum, *slopes = (torch.cat(part) for part in zip(*parts, strict=True))
        entropies = None if entropy == "none" else slopes.pop(0)
        ctx.save_for_backward(hidden, weight, targets, log_sum, entropies, *slopes)
        ctx.head = head
        ctx.set_materialize_grads(False)
        if entropies is not None and entropy == "value":
            ctx.mark_non_differentiable(entropies)
        return chosen - log_sum, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, targets, log_sum, entropies, *slopes = ctx.saved_tensors
        for_hidden, for_weight = None, None
        if ctx.needs_input_grad[0]:
            given = [(one, slope) for one, slope in zip(gradients, slopes, strict=False) if one is not None]
            terms = [gradient[:, None] * slope for gradient, slope in given]
            for_hidden = sum(terms[1:], start=terms[0]).to(hidden.dtype) if terms else None
        if ctx.needs_input_grad[1]:
            of_logprob, of_entropy = (torch.zeros_like(log_sum) if one is None else one for one in gradients)
            for_weight = torch.zeros_like(weight, dtype=log_sum.dtype)
            for rows in ctx.head.rows(len(hidden)):
                for columns in ctx.head.columns():
                    logprobs = ctx.head.of(rows).logits(hidden[rows], weight, columns).sub_(log_sum[rows, None])
                    delta = logprobs.exp()
                    factor = of_logprob[rows, None]
                    if entropies is not None:
                        logprobs.clamp_(min=-1e4).add_(entropies[rows, None]).mul_(of_entropy[rows, None])
                        factor = logprobs.add_(factor)
                    delta.mul_(factor).neg_()
                    place, inside = _within(targets[rows], columns)
                    delta.scatter_add_(1, place, torch.where(inside, of_logprob[rows], 0.0)[:, None])
                    delta = delta.div_(ctx.head.temperature).to(hidden.dtype)
                    for_weight[columns] += torch.mm(delta.t(), hidden[rows])
            for_weight = for_weight.to(weight.dtype)
        return for_hidden, for_weight, None, None, None
