"""The policy update: old log-probabilities once per rollout, then one optimiser step per minibatch.

Plain torch, without Ray: RLlib's learner and `examples/one_process.py` both run this."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rl_vlm.config import OptimizerSection, PolicyConfig, SFTConfig
from rl_vlm.config.learner import AlgorithmSection
from rl_vlm.envs.images import blanked, resized
from rl_vlm.learning.batching import BatchBuilder, MicroBatch, Minibatch
from rl_vlm.learning.losses import LOSSES, Entropy, TokenBatch, kl_estimate, mismatch_weights, token_logprobs
from rl_vlm.learning.plan import TOKEN_SUMS, Scores, UpdateBatch, UpdateStats
from rl_vlm.learning.policy_model import Critic, value_loss
from rl_vlm.learning.strategies import CRITIC_GROUP, Strategy
from rl_vlm.models.loading import TextSide
from rl_vlm.types import EncodedImage, RLVLMError, Trajectory

if TYPE_CHECKING:
    from rl_vlm.learning.policy_model import PolicyModel  # with peft and all of transformers, for env runners too
    from rl_vlm.models.qwen_vl import Backbone


def missing_passes(counts: Sequence[int], device: torch.device) -> list[int]:
    """How many micro-batches this learner has fewer than the one with most, for each optimiser step; all learners call
    this."""
    own = torch.tensor(counts, dtype=torch.int64, device=device)
    most: Tensor = own.clone()
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    return (most - own).tolist()  # type: ignore[no-any-return]


def padding_batch(token_id: int) -> MicroBatch:
    """One row of two tokens, the second sampled, with weight and advantage 0.

    `token_id` is one that the policy may sample.
    """
    nothing, first = np.zeros(1, dtype=np.float32), np.zeros(1, dtype=np.int64)
    return MicroBatch(
        input_ids=np.full((1, 2), token_id, dtype=np.int64),
        position_ids=np.broadcast_to(np.arange(2, dtype=np.int64), (3, 1, 2)).copy(),
        segments=np.array([[0, 1]], dtype=np.int16),
        images=[],
        row=first,
        column=first,
        target=np.full(1, token_id, dtype=np.int64),
        behaviour=nothing,
        sample=first,
        turn=first,
        counts=False,
        weight=nothing,
        advantage=nothing,
        returns=np.full(1, np.nan, dtype=np.float32),
    )


class WeightAverage:
    """average = decay · average + (1 - decay) · weights after each optimiser step; it begins at the given weights.

    A and B of LoRA are averaged each on their own, so the average is not that of their products.
    """

    def __init__(self, weights: Mapping[str, Tensor], decay: float) -> None:
        self._decay = decay
        self._average = {name: tensor.detach().clone() for name, tensor in weights.items()}

    @torch.no_grad()
    def update(self, weights: Mapping[str, Tensor]) -> None:
        """After an optimiser step."""
        for name, average in self._average.items():
            average.lerp_(weights[name].detach(), 1 - self._decay)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The average by name, not copied."""
        return self._average

    def state(self) -> dict[str, Tensor]:
        """The average by name, on the CPU."""
        return {name: tensor.cpu().clone() for name, tensor in self._average.items()}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned."""
        for name, average in self._average.items():
            average.copy_(state[name])


def make_optimizer(policy: PolicyModel, run: PolicyConfig | SFTConfig) -> torch.optim.Optimizer:
    """AdamW (Adam when weight_decay is 0) or Adafactor on the trained weights, and in a second group on the critic.

    Each group keeps its own `base_lr`, which a schedule scales.
    """
    learner = run.learner
    groups: list[dict[str, Any]] = [{"params": policy.parameters, "lr": learner.lr}]
    if policy.critic is not None and isinstance(run, PolicyConfig) and run.critic is not None:
        groups.append({"params": policy.critic.parameters, "lr": run.critic.lr or learner.lr})
    for group in groups:
        group["base_lr"] = group["lr"]
    optimizer: torch.optim.Optimizer
    if learner.optimizer == "adafactor":
        optimizer = torch.optim.Adafactor(groups, lr=learner.lr, weight_decay=learner.weight_decay)
    else:
        optimizer = torch.optim.AdamW(
            groups, lr=learner.lr, betas=learner.betas, weight_decay=learner.weight_decay, fused=True
        )
    optimizer.register_step_post_hook(lambda *_: policy.trained.stepped())
    return optimizer


def scale_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set every group's learning rate to that share of its base."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor


class LossError(RLVLMError):
    """A registered loss does not keep to the seam."""


PositionChange = Callable[[MicroBatch], np.ndarray]


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
        padding: a micro-batch that counts for nothing, where passes of learners wait for each other: all then make as
            many.
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
        self._scored: list[list[MicroBatch]] = []

    @torch.no_grad()
    def score(self, minibatches: Sequence[Minibatch]) -> Scores:
        """What an estimator needs to know of minibatches; the next UpdateBatch without minibatches means these."""
        self._scored = self._pack(minibatches)
        scores = Scores()
        for step, micro_batches in enumerate(self._scored):
            for micro in micro_batches:
                hidden = self._predicting(micro)
                micro.old = self._token_logprobs(hidden, micro)[0]
                if step == 0 and not self._probed:
                    micro.probe = micro.old
                if self._settings.kl_in_reward or self._settings.kl_loss_coef:
                    micro.reference = self._reference(micro)
                    if micro.counts:
                        scores.log_ratio |= micro.split((micro.old - micro.reference).cpu().numpy())
                if self._critic is not None:
                    shares = self._critic.shares_policy
                    micro.values = self._critic.values(hidden) if shares else self._critic_values(micro)
                    if micro.counts:
                        scores.values |= micro.split(micro.values.cpu().numpy())
        return scores

    def pack(self, batch: UpdateBatch) -> list[list[MicroBatch]]:
        """The micro-batches of each optimiser step of an update, with all that must be computed before the first
        step."""
        packed, self._scored = self._scored, []
        if batch.minibatches:
            packed = self._pack(batch.minibatches)
            self._look_back(packed)
        for micro_batches, value_weight in zip(packed, batch.value_weights, strict=True):
            for micro in micro_batches:
                if micro.counts:
                    micro.advantage, micro.value_weight = micro.join(batch.advantages), value_weight
                    micro.returns = micro.join(batch.returns) if batch.returns else micro.returns
                if micro.values is not None and batch.rescaling is not None:
                    micro.values = micro.values * batch.rescaling.factor + batch.rescaling.shift
        if self._critic is not None and batch.rescaling is not None:
            self._critic.rescale(batch.rescaling)
        return packed

    @torch.no_grad()
    def _look_back(self, packed: Sequence[Sequence[MicroBatch]]) -> None:
        """Log-probabilities with the weights as they are before the first step.

        The first minibatch needs no pass of its own: its old log-probabilities are its new ones.
        """
        for step, micro_batches in enumerate(packed):
            for micro in micro_batches:
                if step > 0:
                    micro.old = self.logprobs(micro)[0]
                elif not self._probed:
                    # Once per process: the shortcut must give what a separate pass gives.
                    micro.probe = self.logprobs(micro)[0]
                if self._settings.kl_loss_coef:
                    micro.reference = self._reference(micro)

    def _pack(self, minibatches: Sequence[Minibatch]) -> list[list[MicroBatch]]:
        packed = [self._builder.build(minibatch.groups) for minibatch in minibatches]
        for micro_batches, minibatch in zip(packed, minibatches, strict=True):
            for micro in micro_batches:
                micro.set_weights(minibatch.weights)
        passes = [micro for micro_batches in packed for micro in micro_batches]
        for micro, following in zip(passes, [*passes[1:], *passes[:1]], strict=True):
            micro.next_images = following.images
        if self._padding is not None:
            missing = missing_passes([len(micro_batches) for micro_batches in packed], self._backbone.device)
            for micro_batches, count in zip(packed, missing, strict=True):
                micro_batches += [replace(self._padding) for _ in range(count)]
        return packed

    def step(
        self,
        strategy: Strategy,
        micro_batches: Sequence[MicroBatch],
        max_grad_norm: float,
        stats: UpdateStats,
        learn_policy: bool = True,
    ) -> bool:
        """One optimiser step, of the critic alone where the policy is not to learn.

        Returns whether it was taken: non-finite gradients are skipped.
        """
        # A critic on the policy's hidden states has its loss in the policy's.
        critic = None if learn_policy and self._critic and self._critic.shares_policy else self._critic
        for micro in micro_batches:
            own = stats if micro.counts else UpdateStats()
            if learn_policy:
                strategy.backward(self.loss(micro, own))
            if critic is not None:
                # Gradient checkpointing computes layers anew on the way back, with the adapter that is active then.
                with critic.active():
                    strategy.backward(self.value_loss(micro, own))
        norm = strategy.step(max_grad_norm, None if learn_policy else [CRITIC_GROUP])
        if norm is None:
            stats.skipped_steps += 1
            return False
        stats.grad_norm += norm
        stats.steps += 1
        return True

    def logprobs(self, micro: MicroBatch, entropy: Entropy = "none") -> tuple[Tensor, Tensor | None]:
        """Log-probabilities and, where asked for, entropies float32 [N] of the micro-batch's sampled tokens."""
        return self._token_logprobs(self._predicting(micro), micro, entropy)

    @torch.no_grad()
    def recompute(
        self, trajectories: Sequence[Trajectory], change: PositionChange | None = None, *, adapter: bool = True
    ) -> list[np.ndarray]:
        """Log-probabilities float32 [sampled tokens] of each trajectory with the weights as they are, or without the
        adapter.

        `change` gives a micro-batch other position_ids int64 [3, B, L], to find out what another program may have
        computed.
        """
        logprobs: dict[str, np.ndarray] = {}
        with nullcontext() if adapter else self._without_adapter():
            for micro in self._builder.build([[trajectory] for trajectory in trajectories]):
                if change is not None:
                    micro.position_ids = change(micro)
                logprobs |= micro.split(self.logprobs(micro)[0].cpu().numpy())
        return [logprobs[trajectory.trajectory_id] for trajectory in trajectories]

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

    def loss(self, micro: MicroBatch, stats: UpdateStats) -> Tensor:
        """The weighted loss of one micro-batch, a scalar with a gradient; adds to `stats`.

        With a critic on the policy's hidden states, the value loss is part of it.
        """
        device = self._backbone.device
        values = None
        if self._critic is not None and self._critic.shares_policy:
            hidden = self._predicting(micro)
            new, entropy = self._token_logprobs(hidden, micro, self._entropy)
            values = self._critic.values(hidden)
        else:
            new, entropy = self.logprobs(micro, self._entropy)
        if micro.old is None:
            micro.old = new.detach()  # further epochs compare with the same old policy
        old = micro.old
        if micro.probe is not None and len(micro.probe):
            error = float(((new.detach() - micro.probe).exp() - 1).abs().max())
            stats.first_ratio_error = max(stats.first_ratio_error, error)
            micro.probe, self._probed = None, True
        behaviour = torch.from_numpy(micro.behaviour).to(device)
        advantage = torch.from_numpy(micro.advantage).to(device)
        weight = torch.from_numpy(micro.weight).to(device)
        sample, turn = (torch.from_numpy(ids).to(device) for ids in (micro.sample, micro.turn))
        terms = self._loss(TokenBatch(new, old, behaviour, advantage, sample, turn), self._settings)
        if terms.loss.shape != new.shape:
            raise LossError(
                f"algorithm.loss {self._settings.loss}: it must give one number per token, shape {tuple(new.shape)}, "
                f"and gave {tuple(terms.loss.shape)}."
            )
        correction, masked = mismatch_weights(old, behaviour, sample, self._settings)
        token_loss = terms.loss * correction
        if self._settings.kl_loss_coef:
            assert micro.reference is not None
            kl = kl_estimate(new, micro.reference, self._settings.kl_estimator)
            token_loss = token_loss + self._settings.kl_loss_coef * kl
            stats.kl += float(kl.detach().sum())
        if self._settings.entropy_coef:
            assert entropy is not None
            token_loss = token_loss - self._settings.entropy_coef * entropy
        loss = (token_loss * weight).sum()
        self._record(stats, loss, terms.ratio, terms.clipped, masked, entropy, old - behaviour, new, old)
        return loss if values is None else loss + self._value_loss(micro, values, stats)

    def value_loss(self, micro: MicroBatch, stats: UpdateStats) -> Tensor:
        """The weighted value loss of one micro-batch, with a forward pass of its own; adds to `stats`."""
        assert self._critic is not None
        if not self._critic.shares_policy:
            return self._value_loss(micro, self._critic_values(micro), stats)
        with torch.no_grad():  # the warm-up: the policy stays as it is
            hidden = self._predicting(micro)
        return self._value_loss(micro, self._critic.values(hidden), stats)

    def _value_loss(self, micro: MicroBatch, values: Tensor, stats: UpdateStats) -> Tensor:
        assert self._critic is not None and micro.values is not None
        known = torch.from_numpy(np.flatnonzero(np.isfinite(micro.returns))).to(values.device)
        target = torch.from_numpy(micro.returns).to(values.device)[known]
        per_token = value_loss(values[known], micro.values[known], target, self._critic.clip)
        loss = per_token.sum() * micro.value_weight
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
        # One transfer for all sums, in the order of TOKEN_SUMS: on a GPU each float() would wait for the device.
        *sums, ratio_max = torch.stack(
            [
                loss.detach(),
                clipped.float().sum(),
                new.new_tensor(float("nan")) if entropy is None else entropy.detach().sum(),
                (change.expm1() - change).sum(),
                (gap.expm1() - gap).sum(),
                gap.abs().exp().sum(),
                new.detach().sum(),
                masked.float().sum(),
                ratio.detach().max(),
            ]
        ).tolist()
        for name, value in zip(TOKEN_SUMS, sums, strict=True):
            setattr(stats, name, getattr(stats, name) + value)
        stats.tokens += len(ratio)
        stats.ratio_max = max(stats.ratio_max, ratio_max)


def linear_schedule(iteration: int, total: int, final_fraction: float) -> float:
    """Learning-rate factor that falls linearly from 1 to `final_fraction` over `total` iterations and stays there."""
    progress = min(max(iteration / max(total, 1), 0.0), 1.0)
    return float(np.interp(progress, [0, 1], [1.0, final_fraction]))


def make_builder(policy: PolicyModel, learner: OptimizerSection) -> BatchBuilder:
    """What packs trajectories for a policy."""
    return BatchBuilder(
        image_token_id=policy.text.codec.image_token_id,
        pad_token_id=policy.text.codec.pad_token_id,
        images=policy.text.images,
        max_tokens=learner.micro_batch_tokens,
        share_prompts=learner.share_prompts,
        width=0 if learner.attention == "dense" else policy.backbone.width,
    )


def make_updater(policy: PolicyModel, run: PolicyConfig) -> PolicyUpdater:
    """The policy update that a run configuration describes."""
    return PolicyUpdater(
        policy.backbone,
        make_builder(policy, run.learner),
        run.algorithm,
        temperature=run.rollout.temperature,
        without_adapter=policy.without_adapter,
        critic=policy.critic,
        log_entropy=run.learner.log_entropy,
        padding=padding_batch(policy.text.codec.end_of_turn_id) if run.learner.in_step else None,
    )


# Counterfactuals: log-probabilities that a learner computes when it sees other images or positions, or runs without
# its adapter.

ImagesChange: TypeAlias = Callable[[Sequence[EncodedImage]], tuple[EncodedImage, ...]]


Recompute: TypeAlias = Callable[..., list[np.ndarray]]  # `PolicyUpdater.recompute`


class UnfitImagesError(RLVLMError):
    """The learner makes another number of tokens of an image than the engine did."""


def sight_logprobs(
    trajectories: Sequence[Trajectory], recompute: Recompute, text: TextSide, counterfactuals: bool = True
) -> dict[str, list[np.ndarray]]:
    """Log-probabilities float32 [T] of the sampled tokens of each trajectory, "true", "blank" and by counterfactual.

    The names are those of algorithms/sight.py; one that changes nothing is left out. Raises UnfitImagesError.
    """
    _check_tokens(trajectories, text)
    logprobs = {"true": recompute(trajectories), "blank": recompute(_with_images(trajectories, blanked))}
    if not counterfactuals:
        return logprobs
    if any(len(trajectory.images) > 1 for trajectory in trajectories):
        logprobs["reversed"] = recompute(_with_images(trajectories, _reversed))
    if len(trajectories) > 1:
        logprobs["other"] = recompute(_exchanged(trajectories))
    for name, change in (("no_rows", _without_rows), ("zero_rows", _zero_rows), ("sequential", _sequential)):
        logprobs[name] = recompute(trajectories, change)
    logprobs["base"] = recompute(trajectories, adapter=False)
    return logprobs


def _check_tokens(trajectories: Sequence[Trajectory], text: TextSide) -> None:
    for trajectory in trajectories:
        wanted = sum(text.images.count_tokens(image.width, image.height) for image in trajectory.images)
        there = int((trajectory.token_ids == text.codec.image_token_id).sum())
        if wanted != there:
            raise UnfitImagesError(
                f"{trajectory.trajectory_id} has {there} image tokens, and the learner makes {wanted} of its images."
            )


def _with_images(trajectories: Sequence[Trajectory], change: ImagesChange) -> list[Trajectory]:
    return [replace(trajectory, images=change(trajectory.images)) for trajectory in trajectories]


def _reversed(images: Sequence[EncodedImage]) -> tuple[EncodedImage, ...]:
    return tuple(resized(there, own.width, own.height) for there, own in zip(reversed(images), images, strict=True))


def _exchanged(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Each trajectory with the images of its neighbour: 0 with those of 1 and the other way round, 2 and 3, ..."""
    changed = []
    for number, own in enumerate(trajectories):
        partner = trajectories[number ^ 1] if number ^ 1 < len(trajectories) else trajectories[0]
        pairs = zip(own.images, partner.images, strict=False)
        images = [resized(there, here.width, here.height) for here, there in pairs]
        changed.append(replace(own, images=(*images, *own.images[len(images) :])))
    return changed


def _without_rows(micro: MicroBatch) -> np.ndarray:
    return np.stack([micro.position_ids[0]] * 3)


def _zero_rows(micro: MicroBatch) -> np.ndarray:
    """Only in the first prompt: engines count on from there by themselves."""
    rows = np.where(micro.segments == 0, 0, micro.position_ids[1:])
    return np.concatenate([micro.position_ids[:1], rows])


def _sequential(micro: MicroBatch) -> np.ndarray:
    shape = micro.position_ids.shape
    return np.broadcast_to(np.arange(shape[-1]), shape).copy()
