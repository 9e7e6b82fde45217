"""The policy update: old log-probabilities once per rollout, then one optimiser step per minibatch.

Plain torch, without Ray: RLlib's learner and `examples/one_process.py` both run this."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rl_vlm.config import LearnerSection, PolicyConfig
from rl_vlm.engines.grammars import allowed_tokens, format_matcher
from rl_vlm.learning.batching import MicroBatch, Minibatch, gathered, make_builder, padding_batch
from rl_vlm.learning.critic import value_loss
from rl_vlm.learning.distillation import divergence
from rl_vlm.learning.logprobs import Allowed, Entropy, alternative_logprobs, predicting_states, token_logprobs
from rl_vlm.learning.losses import LOSSES, TokenBatch, kl_estimate, mismatch_weights
from rl_vlm.learning.plan import Scores, TokenRecord, UpdateBatch, UpdateStats
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.learning.sight_check import PositionChange
from rl_vlm.learning.strategies import CRITIC_GROUP, AllReduce, Strategy, missing_passes
from rl_vlm.types import RLVLMError, Trajectory


class Found(NamedTuple):
    """Of the N sampled tokens of a micro-batch, float32."""

    logprobs: Tensor  # [N]
    entropies: Tensor | None  # [N]
    values: Tensor | None  # [N], of a critic that shares the policy's hidden states
    likely: Tensor | None  # [N, K]: log-probabilities of the tokens that a teacher finds most likely


class PolicyUpdater:
    """Computes log-probabilities and losses of one policy, as a run configuration says."""

    def __init__(self, policy: PolicyModel, run: PolicyConfig) -> None:
        self._backbone, self._critic, self._base_model = policy.backbone, policy.critic, policy.trained.base
        self._builder = make_builder(policy, run.learner)
        self._settings, self._temperature, self._teacher = run.algorithm, run.rollout.temperature, run.teacher
        self._format = format_matcher(policy.text, run.rollout.grammar)
        self._loss = LOSSES[run.algorithm.loss]
        measured: Entropy = "value" if run.learner.log_entropy else "none"
        self._entropy: Entropy = "gradient" if run.algorithm.entropy_coef else measured
        # Where the passes of learners wait for each other all must make as many.
        end = policy.text.codec.end_of_turn_id
        self._padding = padding_batch(self._builder, end) if run.learner.in_step else None
        self._probed = False
        self._scored: list[list[MicroBatch]] = []

    def score(self, minibatches: Sequence[Minibatch]) -> Scores:
        """What an estimator needs to know of minibatches; an UpdateBatch without minibatches then means these."""
        self._scored = self._pack(minibatches)
        self._look_back(self._scored, score=True)
        return Scores(
            _of_trajectories(self._scored, lambda micro: _difference(micro.old, micro.reference)),
            _of_trajectories(self._scored, lambda micro: micro.values),
        )

    def pack(self, batch: UpdateBatch) -> list[list[MicroBatch]]:
        """The micro-batches of each optimiser step of an update, with all that is computed before the first step."""
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
    def _look_back(self, packed: Sequence[Sequence[MicroBatch]], score: bool = False) -> None:
        """Compute what depends on the weights before the first step; with `score` also the critic's values.

        Without `score` the first minibatch needs no pass of its own: its old log-probabilities are its new ones. Once
        per process they are computed all the same, to check that both are equal.
        """
        for step, micro_batches in enumerate(packed):
            probes = step == 0 and not self._probed
            for micro in micro_batches:
                if step or score or probes:
                    found = self.logprobs(micro)
                    micro.values = found.values
                    micro.old = found.logprobs if step or score else None
                    micro.probe = found.logprobs if probes else None
                if self._settings.has_reference:
                    with self._base_model():
                        micro.reference = self.logprobs(micro).logprobs
                if score and self._critic is not None and micro.values is None:
                    micro.values = self._critic_values(micro)

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
        """One optimiser step, of the critic alone without `learn_policy`. Returns whether it was taken: a step with
        gradients that are not finite is skipped."""
        # A critic on the policy's hidden states has its loss in the policy's.
        critic = None if learn_policy and self._critic and self._critic.shares_policy else self._critic
        for micro in micro_batches:
            own = stats if micro.counts else UpdateStats()
            if learn_policy:
                strategy.backward(self.loss(micro, own))
            if critic is not None:
                with critic.active():  # in the backward pass, too: gradient checkpointing computes layers again
                    strategy.backward(self._value_loss(micro, self._critic_values(micro), own))
        norm = strategy.step(max_grad_norm, None if learn_policy else [CRITIC_GROUP])
        if norm is None:
            stats.add({"policy/skipped_steps": 1.0})
            return False
        stats.add({"policy/grad_norm": norm, "policy/optimizer_steps": 1.0})
        return True

    def record(self, packed: Sequence[Sequence[MicroBatch]]) -> TokenRecord:
        """What the steps on these micro-batches have found out about their tokens."""
        return TokenRecord(
            logprobs=_of_trajectories(packed, lambda micro: micro.old),
            entropies=_of_trajectories(packed, lambda micro: micro.entropies),
        )

    def logprobs(self, micro: MicroBatch, entropy: Entropy = "none") -> Found:
        """What a forward pass finds of the sampled tokens; entropies where they are asked for."""
        backbone, temperature, device = self._backbone, self._temperature, self._backbone.device
        hidden, target = predicting_states(backbone, micro), torch.from_numpy(micro.target).to(device)
        allowed = self._allowed(micro)
        found = token_logprobs(backbone, hidden, target, temperature, entropy=entropy, allowed=allowed)
        values = self._critic.values(hidden) if self._critic and self._critic.shares_policy else None
        likely = None
        if micro.teacher is not None and torch.is_grad_enabled():
            ids = torch.from_numpy(micro.teacher.ids).long().to(device)
            likely = alternative_logprobs(backbone, hidden, target, found[0], ids, temperature)
        return Found(*found, values, likely)

    def _allowed(self, micro: MicroBatch) -> Allowed | None:
        """What `rollout.format` allowed at each token; found once, while a GPU computes the hidden states."""
        if self._format is None or not micro.counts:
            return None
        micro.allowed = micro.allowed or allowed_tokens(self._format, micro.turns)
        return Allowed(*(torch.from_numpy(array).to(self._backbone.device) for array in micro.allowed))

    def _critic_values(self, micro: MicroBatch) -> Tensor:
        """The critic's values, by a forward pass of their own in which the policy learns nothing."""
        assert self._critic is not None
        with self._critic.active(), torch.no_grad() if self._critic.shares_policy else nullcontext():
            hidden = predicting_states(self._backbone, micro)
        return self._critic.values(hidden)

    @torch.no_grad()
    def recompute(
        self, trajectories: Sequence[Trajectory], change: PositionChange | None = None, *, adapter: bool = True
    ) -> list[np.ndarray]:
        """Log-probabilities float32 [T] of each trajectory's sampled tokens, also without the adapter. `change` gives a
        micro-batch other position_ids int64 [3, B, L]."""
        found: list[tuple[MicroBatch, np.ndarray]] = []
        with nullcontext() if adapter else self._base_model():
            for micro in self._builder.build([[trajectory] for trajectory in trajectories]):
                if change is not None:
                    micro.position_ids = change(micro)
                found.append((micro, self.logprobs(micro).logprobs.cpu().numpy()))
        logprobs = gathered(found)
        return [logprobs[trajectory.trajectory_id] for trajectory in trajectories]

    def loss(self, micro: MicroBatch, stats: UpdateStats) -> Tensor:
        """The weighted loss of a micro-batch, with that of a critic on the policy's hidden states; adds to `stats`."""
        settings = self._settings
        new, entropy, values, likely = self.logprobs(micro, self._entropy)
        if micro.old is None:
            micro.old = new.detach()  # further epochs compare with the same old policy
        if micro.entropies is None and entropy is not None:
            micro.entropies = entropy.detach()
        old = micro.old
        if micro.probe is not None and len(micro.probe):
            error = float(((new.detach() - micro.probe).exp() - 1).abs().max())
            stats.add({"policy/first_ratio_error": error})
            micro.probe, self._probed = None, True
        behaviour, advantage, weight, sample, turn = (
            torch.from_numpy(array).to(self._backbone.device)
            for array in (micro.behaviour, micro.advantage, micro.weight, micro.sample, micro.turn)
        )
        terms = self._loss(TokenBatch(new, old, behaviour, advantage, sample, turn), settings)
        if terms.loss.shape != new.shape:
            raise RLVLMError(
                f"algorithm.loss {settings.loss}: it must give one number per token, shape {tuple(new.shape)}, "
                f"and gave {tuple(terms.loss.shape)}."
            )
        correction, masked = mismatch_weights(old, behaviour, sample, settings)
        token_loss = terms.loss * correction
        kl = torch.zeros_like(new)
        if settings.kl_loss_coef:
            assert micro.reference is not None
            kl = kl_estimate(new, micro.reference, settings.kl_estimator)
            token_loss = token_loss + settings.kl_loss_coef * kl
        if settings.entropy_coef:
            assert entropy is not None
            token_loss = token_loss - settings.entropy_coef * entropy
        distance = torch.zeros_like(new)
        if likely is not None:
            assert self._teacher is not None and self._teacher.divergence != "reverse" and micro.teacher is not None
            teacher = torch.from_numpy(micro.teacher.top).to(self._backbone.device)
            distance = divergence(likely, teacher, self._teacher.divergence)
            token_loss = token_loss + self._teacher.weight * distance
        loss = (token_loss * weight).sum()
        with torch.no_grad():
            change, gap = new - old, old - behaviour
            sums = {
                "policy/loss": loss,
                "policy/clip_fraction": terms.clipped.float().sum(),
                "policy/ratio_max": terms.ratio.max(),
                "policy/kl": kl.sum(),
                "policy/approx_kl": (change.expm1() - change).sum(),
                "policy/entropy": new.new_tensor(float("nan")) if entropy is None else entropy.sum(),
                "policy/token_logprob_mean": new.sum(),
                "mismatch/kl": (gap.expm1() - gap).sum(),
                "mismatch/token_mult_prob_error": gap.abs().exp().sum(),
                "mismatch/masked": masked.float().sum(),
            }
            if likely is not None:
                sums["distill/divergence"] = distance.sum()
            # One transfer for all: on a GPU each float() would wait for the device.
            stats.add(dict(zip(sums, torch.stack(list(sums.values())).tolist(), strict=True)))
            stats.add({"tokens": float(len(new))})
        return loss if values is None else loss + self._value_loss(micro, values, stats)

    def _value_loss(self, micro: MicroBatch, values: Tensor, stats: UpdateStats) -> Tensor:
        assert self._critic is not None and micro.values is not None
        known = torch.from_numpy(np.flatnonzero(np.isfinite(micro.returns))).to(values.device)
        target = torch.from_numpy(micro.returns).to(values.device)[known]
        per_token = value_loss(values[known], micro.values[known], target, self._critic.clip)
        loss = per_token.sum() * micro.value_weight
        stats.add({"value/loss": float(loss.detach())})
        return self._critic.loss_coef * loss


def _difference(minuend: Tensor | None, subtrahend: Tensor | None) -> Tensor | None:
    return None if minuend is None or subtrahend is None else minuend - subtrahend


def _of_trajectories(
    packed: Sequence[Sequence[MicroBatch]], known: Callable[[MicroBatch], Tensor | None]
) -> dict[str, np.ndarray]:
    """What is known of each token of the micro-batches that count, by trajectory id: float32 [sampled tokens]."""
    micros = [micro for micro_batches in packed for micro in micro_batches if micro.counts]
    pairs = [(micro, tokens) for micro in micros if (tokens := known(micro)) is not None]
    return gathered((micro, tokens.float().cpu().numpy()) for micro, tokens in pairs)


def make_strategy(learner: LearnerSection, policy: PolicyModel, optimizer: torch.optim.Optimizer) -> Strategy:
    """The strategy of a learner group, before the first step."""
    if learner.strategy == "fsdp2" or learner.zero_stage:
        if policy.lora is None:
            from rl_vlm.learning.sharded_training import FullFSDP2

            return FullFSDP2(policy, optimizer)
        from rl_vlm.learning import sharded  # takes long to import

        return (sharded.Zero if learner.zero_stage else sharded.FSDP2)(policy, optimizer, learner)
    name = learner.strategy or ("all_reduce" if learner.num_learners > 1 else "single")
    return (AllReduce if name == "all_reduce" else Strategy)(policy, optimizer)
