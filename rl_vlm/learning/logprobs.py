"""Log-probabilities of given tokens, with a gradient that is written out: no logits of all positions are in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from rl_vlm.learning.batching import MicroBatch
from rl_vlm.learning.sizes import HEAD_TILES
from rl_vlm.models.families.generic import Backbone
from rl_vlm.models.kernels import linear, wide_product

# What is wanted of the entropies: nothing, their values, or values with a gradient.
Entropy: TypeAlias = Literal["none", "value", "gradient"]

_CAPPED_ROWS = 512  # whose logits exist at once where they are capped


def predicting_states(backbone: Backbone, micro: MicroBatch) -> Tensor:
    """The hidden states [N, D] that predict the sampled tokens."""
    device = backbone.device
    features = backbone.image_features(micro.images) if micro.images else ()
    backbone.announce_images(micro.next_images)
    hidden = backbone.hidden_states(
        torch.from_numpy(micro.input_ids).to(device),
        torch.from_numpy(micro.position_ids).to(device),
        backbone.attention(micro.segments),
        features,
    )
    return hidden[torch.from_numpy(micro.row).to(device), torch.from_numpy(micro.column).to(device)]


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


def alternative_logprobs(
    backbone: Backbone, hidden: Tensor, targets: Tensor, logprobs: Tensor, others: Tensor, temperature: float
) -> Tensor:
    """Log-probabilities [N, K] of `others` int64 [N, K] from hidden states [N, D], where those of `targets` [N] are
    known: the logarithm of the sum over the vocabulary follows from these. -inf where the policy never samples one.

    Not for what a grammar has allowed."""
    compared = torch.cat([targets[:, None], others], 1)
    weight, bias = backbone.lm_head.weight, backbone.token_bias[compared]
    if backbone.wide_head:
        hidden, weight = hidden.float(), weight.float()
    logits = torch.bmm(weight[compared], hidden[:, :, None])[:, :, 0].to(logprobs.dtype)
    if backbone.softcap is not None:
        logits = backbone.softcap * torch.tanh(logits / backbone.softcap)
    logits = (logits + bias) / temperature
    return logits[:, 1:] - logits[:, :1] + logprobs[:, None]


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
