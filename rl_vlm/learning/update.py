"""The policy update: old log-probabilities once per rollout, then one optimiser step per minibatch.

Plain torch, without Ray: RLlib's learner and the single-process loop of the benchmarks both run this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rl_vlm.config.algorithm import AlgorithmSection
from rl_vlm.learning.batching import BatchBuilder, MicroBatch, Minibatch, TrainSample
from rl_vlm.learning.critic import Critic, value_loss
from rl_vlm.learning.logprobs import Entropy, token_logprobs
from rl_vlm.learning.losses import LOSSES, TokenBatch, kl_estimate
from rl_vlm.learning.mismatch import mismatch_weights
from rl_vlm.learning.padding import missing_passes
from rl_vlm.learning.returns import Rescaling
from rl_vlm.learning.scores import Scores, Targets
from rl_vlm.learning.stats import UpdateStats
from rl_vlm.types import RLVLMError, Trajectory

if TYPE_CHECKING:
    # env runners import this module and must not import the model's
    from rl_vlm.models.backbone import Backbone


@dataclass(slots=True)
class PackedMinibatch:
    """The micro-batches of one optimiser step and, per micro-batch, the old and reference log-probabilities [N]."""

    micro_batches: list[MicroBatch]
    old: list[Tensor | None] = field(default_factory=list)
    reference: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)  # of the critic, before the first step
    value_weight: float = 0.0  # of each token that has a return: one over their number in the whole step
    probe: dict[int, Tensor] = field(
        default_factory=dict
    )  # log-probabilities of a separate pass, to check first ratios
    padding: int = 0  # micro-batches at the end that count for nothing

    @property
    def counted(self) -> list[MicroBatch]:
        """The micro-batches without padding."""
        return self.micro_batches[: len(self.micro_batches) - self.padding]


class LossError(RLVLMError):
    """A registered loss does not keep to the seam."""


PositionChange = Callable[[MicroBatch], np.ndarray]
MicroBatchLoss = Callable[[PackedMinibatch, int, UpdateStats], Tensor]


@dataclass(frozen=True, slots=True)
class LossPass:
    """A loss of a micro-batch, and the context of its forward and its backward pass.

    Gradient checkpointing computes layers anew on the way back, with the adapter that is active then.
    """

    loss: MicroBatchLoss
    within: Callable[[], AbstractContextManager[None]] = nullcontext


class PolicyUpdater:
    """Computes log-probabilities and losses for one model.

    Args:
        backbone: the model with trainable LoRA layers.
        builder: packs minibatches.
        settings: the loss and its constants.
        temperature: the sampling temperature of the rollouts.
        without_adapter: context in which the model computes as the base model, for the KL penalty.
        critic: the value function, for PPO.
        log_entropy: measure entropies even where no bonus needs them.
        padding: a micro-batch that counts for nothing, where passes of learners wait for each other: all then make as many.
    """

    def __init__(
        self,
        backbone: Backbone,
        builder: BatchBuilder,
        settings: AlgorithmSection,
        *,
        temperature: float,
        without_adapter: Callable[[], AbstractContextManager[None]] = nullcontext,
        critic: Critic | None = None,
        log_entropy: bool = True,
        padding: MicroBatch | None = None,
    ) -> None:
        self._backbone = backbone
        self._builder = builder
        self._loss = LOSSES.get(settings.loss)
        self._settings = settings
        self._temperature = temperature
        self._without_adapter = without_adapter
        self._critic = critic
        self._entropy: Entropy = "gradient" if settings.entropy_coef else "value" if log_entropy else "none"
        self._padding = padding
        self._probed = False

    def pack(self, minibatches: Sequence[Minibatch]) -> list[PackedMinibatch]:
        """Pack minibatches and fill in what must be computed with the weights as they are before the first step.

        The first minibatch needs no pass of its own: its old log-probabilities are its new ones.
        """
        packed = self._build(minibatches)
        for number, minibatch in enumerate(packed):
            for micro in minibatch.micro_batches:
                old = None
                if number > 0:
                    with torch.no_grad():
                        old, _ = self.logprobs(micro)
                elif not self._probed:
                    # Once per process: the shortcut below must give what a separate pass gives.
                    with torch.no_grad():
                        minibatch.probe[len(minibatch.old)] = self.logprobs(micro)[0]
                minibatch.old.append(old)
                if self._settings.kl_loss_coef:
                    minibatch.reference.append(self._reference(micro))
        return packed

    def _build(self, minibatches: Sequence[Minibatch]) -> list[PackedMinibatch]:
        packed = [PackedMinibatch(self._builder.build(minibatch)) for minibatch in minibatches]
        if self._padding is not None:
            missing = missing_passes([len(minibatch.micro_batches) for minibatch in packed], self._backbone.device)
            for minibatch, count in zip(packed, missing, strict=True):
                minibatch.padding = count
                minibatch.micro_batches += [self._padding] * count
        passes = [micro for minibatch in packed for micro in minibatch.counted]
        for micro, following in zip(passes, [*passes[1:], *passes[:1]], strict=True):
            micro.next_images = following.images
        return packed

    @torch.no_grad()
    def score(self, minibatches: Sequence[Minibatch]) -> tuple[list[PackedMinibatch], Scores]:
        """Pack minibatches whose advantages follow later (`set_targets`), with what an estimator needs to know of them."""
        packed = self._build(minibatches)
        scores = Scores()
        for minibatch in packed:
            for number, micro in enumerate(minibatch.micro_batches):
                counted = number < len(minibatch.counted)
                hidden = self._predicting(micro)
                old = self._token_logprobs(hidden, micro)[0]
                minibatch.old.append(old)
                if self._settings.kl_in_reward or self._settings.kl_loss_coef:
                    reference = self._reference(micro)
                    if self._settings.kl_loss_coef:
                        minibatch.reference.append(reference)
                    if counted:
                        scores.log_ratio |= micro.split((old - reference).cpu().numpy())
                if self._critic is not None:
                    values = self._critic.values(hidden) if self._critic.shares_policy else self._critic_values(micro)
                    minibatch.values.append(values)
                    if counted:
                        scores.values |= micro.split(values.cpu().numpy())
        if packed and not self._probed:
            packed[0].probe = dict(enumerate(packed[0].old))  # type: ignore[arg-type]
        return packed, scores

    def set_targets(
        self, packed: Sequence[PackedMinibatch], targets: Targets, rescaling: Rescaling | None = None
    ) -> None:
        """Fill the advantages and returns into scored minibatches, and change the critic's normalisation."""
        for minibatch, weight in zip(packed, targets.value_weights, strict=True):
            minibatch.value_weight = weight
            for micro in minibatch.counted:
                micro.advantage = micro.join(targets.advantages)
                micro.returns = micro.join(targets.returns) if targets.returns else None
        if self._critic is not None and rescaling is not None:
            self._critic.rescale(rescaling)
            for minibatch in packed:
                minibatch.values = [values * rescaling.factor + rescaling.shift for values in minibatch.values]

    def losses(self, learn_policy: bool = True) -> list[LossPass]:
        """What an optimiser step adds up for each micro-batch, each with a forward pass of its own."""
        policy = [LossPass(self.loss)] if learn_policy else []
        if self._critic is None or (learn_policy and self._critic.shares_policy):
            return policy
        return [*policy, LossPass(self.value_loss, self._critic.active)]

    def logprobs(self, micro: MicroBatch, entropy: Entropy = "none") -> tuple[Tensor, Tensor | None]:
        """Log-probabilities and, where asked for, entropies float32 [N] of the micro-batch's sampled tokens."""
        return self._token_logprobs(self._predicting(micro), micro, entropy)

    @torch.no_grad()
    def recompute(
        self, trajectories: Sequence[Trajectory], change: PositionChange | None = None, *, adapter: bool = True
    ) -> list[np.ndarray]:
        """Log-probabilities float32 [sampled tokens] of each trajectory with the weights as they are, or without the adapter.

        `change` gives a micro-batch other position_ids int64 [3, B, L], to find out what another program may have computed.
        """
        samples = [TrainSample(one, np.zeros(one.num_sampled, dtype=np.float32), 0.0) for one in trajectories]
        found: dict[str, np.ndarray] = {}
        with nullcontext() if adapter else self._without_adapter():
            for micro in self._builder.build(Minibatch([[sample] for sample in samples])):
                if change is not None:
                    micro.position_ids = change(micro)
                found |= micro.split(self.logprobs(micro)[0].cpu().numpy())
        return [found[trajectory.trajectory_id] for trajectory in trajectories]

    @torch.no_grad()
    def _reference(self, micro: MicroBatch) -> Tensor:
        with self._without_adapter():
            return self.logprobs(micro)[0]

    def _critic_values(self, micro: MicroBatch) -> Tensor:
        assert self._critic is not None
        with self._critic.active():
            return self._critic.values(self._predicting(micro))

    def _token_logprobs(
        self, hidden: Tensor, micro: MicroBatch, entropy: Entropy = "none"
    ) -> tuple[Tensor, Tensor | None]:
        target = torch.from_numpy(micro.target).to(self._backbone.device)
        return token_logprobs(self._backbone, hidden, target, self._temperature, entropy=entropy)

    def _predicting(self, micro: MicroBatch) -> Tensor:
        """The hidden states [N, D] that predict the sampled tokens."""
        device = self._backbone.device
        features = self._backbone.image_features(micro.images) if micro.images else ()
        self._backbone.announce_images(micro.next_images)
        hidden = self._backbone.hidden_states(
            torch.from_numpy(micro.input_ids).to(device),
            torch.from_numpy(micro.position_ids).to(device),
            self._backbone.attention(micro.segments),
            features,
        )
        return hidden[torch.from_numpy(micro.row).to(device), torch.from_numpy(micro.column).to(device)]

    def loss(self, minibatch: PackedMinibatch, number: int, stats: UpdateStats) -> Tensor:
        """The weighted loss of one micro-batch, a scalar with a gradient; adds to `stats`.

        With a critic on the policy's hidden states, the value loss is part of it.
        """
        micro = minibatch.micro_batches[number]
        device = self._backbone.device
        values = None
        if self._critic is not None and self._critic.shares_policy:
            hidden = self._predicting(micro)
            new, entropy = self._token_logprobs(hidden, micro, self._entropy)
            values = self._critic.values(hidden.detach() if self._critic.stop_gradient else hidden)
        else:
            new, entropy = self.logprobs(micro, self._entropy)
        old = minibatch.old[number]
        if old is None:
            old = new.detach()
            minibatch.old[number] = old  # further epochs over this minibatch compare with the same old policy
        if (probe := minibatch.probe.pop(number, None)) is not None and len(probe):
            error = float(((new.detach() - probe).exp() - 1).abs().max())
            stats.first_ratio_error = max(stats.first_ratio_error, error)
            self._probed = True
        behaviour = torch.from_numpy(micro.behaviour).to(device)
        advantage = torch.from_numpy(micro.advantage).to(device)
        weight = torch.from_numpy(micro.weight).to(device)
        sample, turn = (torch.from_numpy(ids).to(device) for ids in (micro.sample, micro.turn))
        terms = self._loss(TokenBatch(new, old, behaviour, advantage, sample, turn), self._settings)
        if terms.loss.shape != new.shape:
            raise LossError(
                f"algorithm.loss {self._settings.loss}: it must give one number per token, shape {tuple(new.shape)}, and gave "
                f"{tuple(terms.loss.shape)}."
            )
        correction, masked = mismatch_weights(old, behaviour, sample, self._settings)
        token_loss = terms.loss * correction
        if self._settings.kl_loss_coef:
            kl = kl_estimate(new, minibatch.reference[number], self._settings.kl_estimator)
            token_loss = token_loss + self._settings.kl_loss_coef * kl
            stats.kl += float(kl.detach().sum())
        if self._settings.entropy_coef:
            assert entropy is not None
            token_loss = token_loss - self._settings.entropy_coef * entropy
        loss = (token_loss * weight).sum()
        self._record(stats, loss, terms.ratio, terms.clipped, masked, entropy, old - behaviour, new, old)
        return loss if values is None else loss + self._value_loss(minibatch, number, values, stats)

    def value_loss(self, minibatch: PackedMinibatch, number: int, stats: UpdateStats) -> Tensor:
        """The weighted value loss of one micro-batch, with a forward pass of its own; adds to `stats`."""
        micro = minibatch.micro_batches[number]
        assert self._critic is not None
        if self._critic.shares_policy:  # the warm-up: the policy stays as it is
            with torch.no_grad():
                hidden = self._predicting(micro)
            values = self._critic.values(hidden)
        else:
            values = self._critic_values(micro)
        return self._value_loss(minibatch, number, values, stats)

    def _value_loss(self, minibatch: PackedMinibatch, number: int, values: Tensor, stats: UpdateStats) -> Tensor:
        assert self._critic is not None
        returns = minibatch.micro_batches[number].returns
        assert returns is not None
        known = torch.from_numpy(np.flatnonzero(np.isfinite(returns))).to(values.device)
        target = torch.from_numpy(returns).to(values.device)[known]
        per_token = value_loss(values[known], minibatch.values[number][known], target, self._critic.clip)
        loss = per_token.sum() * minibatch.value_weight
        stats.value_loss += float(loss.detach())
        return self._critic.loss_coef * loss

    @staticmethod
    @torch.no_grad()
    def _record(
        stats: UpdateStats,
        loss: Tensor,
        ratio: Tensor,
        clipped: Tensor,
        masked: Tensor,
        entropy: Tensor | None,
        gap: Tensor,
        new: Tensor,
        old: Tensor,
    ) -> None:
        change = new.detach() - old
        # One transfer for all figures: on a GPU each float() would wait for the device.
        figures = torch.stack(
            [
                loss.detach(),
                clipped.float().sum(),
                new.new_tensor(float("nan")) if entropy is None else entropy.detach().sum(),
                (change.expm1() - change).sum(),
                (gap.expm1() - gap).sum(),
                gap.abs().exp().sum(),
                ratio.detach().max(),
                new.detach().sum(),
                masked.float().sum(),
            ]
        ).tolist()
        stats.tokens += len(ratio)
        stats.loss += figures[0]
        stats.clipped += figures[1]
        stats.entropy += figures[2]
        stats.approx_kl += figures[3]
        stats.mismatch_kl += figures[4]
        stats.mismatch_prob += figures[5]
        stats.ratio_max = max(stats.ratio_max, figures[6])
        stats.logprob += figures[7]
        stats.masked += figures[8]


def linear_schedule(iteration: int, total: int, final_fraction: float) -> float:
    """Learning-rate factor that falls linearly from 1 to `final_fraction` over `total` iterations and stays there."""
    progress = min(max(iteration / max(total, 1), 0.0), 1.0)
    return float(np.interp(progress, [0, 1], [1.0, final_fraction]))
