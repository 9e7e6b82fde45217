"""The policy update: old log-probabilities once per rollout, then one optimiser step per minibatch.

Plain torch, without Ray: RLlib's learner and `examples/one_process.py` both run this."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from rl_vlm.batches import in_batches
from rl_vlm.config import LearnerSection, OptimizerSection, PolicyConfig, SFTConfig
from rl_vlm.engines.grammars import allowed_tokens, format_matcher
from rl_vlm.envs.images import blanked, resized
from rl_vlm.learning.batching import BatchBuilder, MicroBatch, Minibatch
from rl_vlm.learning.losses import LOSSES, Allowed, Entropy, TokenBatch, kl_estimate, mismatch_weights, token_logprobs
from rl_vlm.learning.plan import Scores, TokenRecord, UpdateBatch, UpdateStats
from rl_vlm.learning.policy_model import PolicyModel, value_loss
from rl_vlm.models.families.generic import Backbone
from rl_vlm.types import EncodedImage, RLVLMError, StopReason, Trajectory, TrajectoryStatus, Turn, UserInputError


def missing_passes(counts: Sequence[int], device: torch.device) -> list[int]:
    """How many micro-batches this learner has fewer than any, by optimiser step. All learners call this together."""
    own = torch.tensor(counts, dtype=torch.int64, device=device)
    most: Tensor = own.clone()
    torch.distributed.all_reduce(most, torch.distributed.ReduceOp.MAX)
    return (most - own).tolist()  # type: ignore[no-any-return]


def padding_batch(builder: BatchBuilder, token_id: int) -> MicroBatch:
    """One row of two tokens `token_id` that the policy may sample, the second sampled, with weight and advantage 0."""
    turns = (Turn(1, 2, 0, StopReason.END_OF_TURN),)
    ids, mask, logprobs = np.full(2, token_id, np.int32), np.array([False, True]), np.zeros(2, np.float32)
    (micro,) = builder.build([[Trajectory("", ids, mask, logprobs, turns, TrajectoryStatus.COMPLETED)]])
    nothing = np.zeros(1, np.float32)
    return replace(micro, counts=False, weight=nothing, advantage=nothing, returns=np.full(1, np.nan, np.float32))


@torch.no_grad()
def move_average(average: Mapping[str, Tensor], weights: Mapping[str, Tensor], decay: float) -> None:
    """average = decay · average + (1 - decay) · weights; A and B of LoRA each on their own, not their product."""
    for name, tensor in average.items():
        tensor.lerp_(weights[name].detach(), 1 - decay)


def make_optimizer(policy: PolicyModel, run: PolicyConfig | SFTConfig) -> torch.optim.Optimizer:
    """AdamW or Adafactor on what is trained and, in a second group, on the critic. `scale_lr` scales `base_lr`."""
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
    """Set the learning rate of every group to this share of its `base_lr`."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor


# How the learners of a group share an optimiser step, and the optimiser's state by name.

POLICY_GROUP, CRITIC_GROUP = 0, 1  # of the optimiser's parameter groups
BUCKET = 50_000_000  # elements of gradients that are sent at once; DeepSpeed allocates as many


class Strategy:
    """An optimiser step of a single learner: `backward` for each micro-batch, then `step`."""

    def __init__(self, policy: PolicyModel, optimizer: torch.optim.Optimizer) -> None:
        self._policy, self._optimizer = policy, optimizer
        optimizer.zero_grad(set_to_none=True)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of one micro-batch, whose loss weights are normalised over all learners."""
        loss.backward()  # type: ignore[no-untyped-call]

    def step(self, max_grad_norm: float, groups: Sequence[int] | None = None) -> float | None:
        """Clip each parameter group (None: all) to the norm, step them, forget the gradients.

        Returns the policy's norm before clipping (0 for a step of the critic alone); None: not finite, not stepped.
        """
        every = [group["params"] for group in self._optimizer.param_groups]
        stepped = every if groups is None else [every[k] for k in groups]
        self._sum_gradients([parameter for parameters in stepped for parameter in parameters])
        # Each group by itself: large gradients of a critic must not shrink the policy's.
        norms = [float(torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)) for parameters in stepped]
        finite = all(map(math.isfinite, norms))
        if finite:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        if not finite:
            return None
        return norms[0] if groups is None or POLICY_GROUP in groups else 0.0

    def _sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Replace gradients by their sum over all learners; one learner has nothing to add."""

    def state(self) -> dict[str, Tensor]:
        """The optimiser's state as CPU tensors by name (`exp_avg.3`), whatever the number of learners."""
        state = self._optimizer.state_dict()["state"]
        return {f"{name}.{k}": tensor.cpu() for k, fields in state.items() for name, tensor in fields.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned, also for another number of learners."""
        fields: dict[int, dict[str, Any]] = {}
        for name, tensor in state.items():
            kind, _, number = name.rpartition(".")
            fields.setdefault(int(number), {})[kind] = tensor
        kinds = {kind for tensors in fields.values() for kind in tensors}
        if kinds and ("exp_avg" in kinds) == isinstance(self._optimizer, torch.optim.Adafactor):
            raise UserInputError("The checkpoint was written with another optimiser: keep learner.optimizer as it was.")
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": fields, "param_groups": groups})


class AllReduce(Strategy):
    """One sum of the gradients over all learners per step, which equals the step of one process.

    Learners without a micro-batch take part with zeros. A parameter that has a gradient in no learner, such as a vision
    tower's in a step without images, gets none: the optimiser would move it by its momentum and decay it.
    """

    def _sum_gradients(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        holders = torch.tensor([int(one.grad is not None) for one in parameters], device=parameters[0].device)
        torch.distributed.all_reduce(holders)
        held = [parameter for parameter, count in zip(parameters, holders.tolist(), strict=True) if count]
        for parameter in held:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        # All gradients of a model as one vector would be a second copy of them.
        for bucket in in_batches(held, lambda few, one: sum(each.numel() for each in few) + one.numel() <= BUCKET):
            gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
            vector = parameters_to_vector(gradients)
            torch.distributed.all_reduce(vector)
            vector_to_parameters(vector, gradients)


def make_strategy(learner: LearnerSection, policy: PolicyModel, optimizer: torch.optim.Optimizer) -> Strategy:
    """The strategy of a learner group, before the first step."""
    if learner.strategy == "fsdp2" or learner.zero_stage:
        from rl_vlm.learning import sharded  # takes long to import

        return (sharded.Zero if learner.zero_stage else sharded.FSDP2)(policy, optimizer, learner)
    name = learner.strategy or ("all_reduce" if learner.num_learners > 1 else "single")
    return (AllReduce if name == "all_reduce" else Strategy)(policy, optimizer)


class UnfitImagesError(RLVLMError):
    """The learner makes another number of tokens of an image than the engine did.

    Do: use one version of transformers and of the model on all machines.
    """


PositionChange = Callable[[MicroBatch], np.ndarray]


_ROWS_AND_COLUMNS = np.array([False, True, True])[:, None, None]  # of positions, whose first axis is time
# Image positions that a faulty engine may have computed where positions have axes.
_OTHER_POSITIONS: dict[str, PositionChange] = {
    "no_rows": lambda micro: np.stack([micro.position_ids[0]] * 3),
    # Only in the first prompt: engines count on from there by themselves.
    "zero_rows": lambda micro: np.where((micro.segments == 0) & _ROWS_AND_COLUMNS, 0, micro.position_ids),
    "sequential": lambda micro: np.zeros_like(micro.position_ids) + np.arange(micro.position_ids.shape[-1]),
}


def _one_place(micro: MicroBatch, image_token_id: int) -> np.ndarray:
    """As if all tokens of an image that stand together had one position."""
    is_image = micro.input_ids == image_token_id
    later = is_image & np.pad(is_image, ((0, 0), (1, 0)))[:, :-1]
    return np.stack([np.cumsum(~later, axis=1) - 1] * len(micro.position_ids))


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


class PolicyUpdater:
    """Computes log-probabilities and losses of one policy, as a run configuration says."""

    def __init__(self, policy: PolicyModel, run: PolicyConfig) -> None:
        self._backbone, self._critic, self._base_model = policy.backbone, policy.critic, policy.trained.base
        self._text, self._builder = policy.text, make_builder(policy, run.learner)
        self._settings, self._temperature = run.algorithm, run.rollout.temperature
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
        scores = Scores()
        for micro in (micro for micro_batches in self._scored for micro in micro_batches if micro.counts):
            if micro.old is not None and micro.reference is not None:
                scores.log_ratio |= micro.split((micro.old - micro.reference).cpu().numpy())
            if micro.values is not None:
                scores.values |= micro.split(micro.values.cpu().numpy())
        return scores

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
                    logprobs, _, micro.values = self.logprobs(micro)
                    micro.old = logprobs if step or score else None
                    micro.probe = logprobs if probes else None
                if self._settings.has_reference:
                    with self._base_model():
                        micro.reference = self.logprobs(micro)[0]
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
        tokens = TokenRecord()
        for micro in (micro for micro_batches in packed for micro in micro_batches if micro.counts):
            for arrays, found in ((tokens.logprobs, micro.old), (tokens.entropies, micro.entropies)):
                arrays |= {} if found is None else micro.split(found.float().cpu().numpy())
        return tokens

    def logprobs(self, micro: MicroBatch, entropy: Entropy = "none") -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Log-probabilities of the sampled tokens, their entropies where asked for, and the values of a critic that
        shares the policy's hidden states: float32 [N]."""
        hidden, target = predicting_states(self._backbone, micro), torch.from_numpy(micro.target)
        target, allowed = target.to(self._backbone.device), self._allowed(micro)
        found = token_logprobs(self._backbone, hidden, target, self._temperature, entropy=entropy, allowed=allowed)
        return *found, self._critic.values(hidden) if self._critic and self._critic.shares_policy else None

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
        logprobs: dict[str, np.ndarray] = {}
        with nullcontext() if adapter else self._base_model():
            for micro in self._builder.build([[trajectory] for trajectory in trajectories]):
                if change is not None:
                    micro.position_ids = change(micro)
                logprobs |= micro.split(self.logprobs(micro)[0].cpu().numpy())
        return [logprobs[trajectory.trajectory_id] for trajectory in trajectories]

    def sight_logprobs(
        self, trajectories: Sequence[Trajectory], counterfactuals: bool = True
    ) -> dict[str, list[np.ndarray]]:
        """Log-probabilities float32 [T] of each trajectory's sampled tokens by the names of evaluation/sight_faults.py:
        "true", "blank", and counterfactuals with other images or positions or without the adapter, as far as they
        change something. Raises UnfitImagesError."""
        for one in trajectories:
            wanted = sum(self._text.images.num_features(image.width, image.height) for image in one.images)
            there = int((one.token_ids == self._text.images.image_token_id).sum())
            if wanted != there:
                raise UnfitImagesError(
                    f"{one.trajectory_id} has {there} image tokens, and the learner makes {wanted} of its images."
                )
        blank = [replace(one, images=blanked(one.images)) for one in trajectories]
        logprobs = {"true": self.recompute(trajectories), "blank": self.recompute(blank)}
        if not counterfactuals:
            return logprobs
        if any(len(one.images) > 1 for one in trajectories):
            logprobs["reversed"] = self.recompute([_shown(one, one.images[::-1]) for one in trajectories])
        if len(trajectories) > 1:
            # Those of its neighbour: 0 with those of 1 and the other way round, 2 and 3, ...
            partners = [trajectories[k ^ 1 if k ^ 1 < len(trajectories) else 0] for k in range(len(trajectories))]
            pairs = zip(trajectories, partners, strict=True)
            logprobs["other"] = self.recompute([_shown(one, partner.images) for one, partner in pairs])
        changes = dict(_OTHER_POSITIONS) if self._text.images.axes > 1 else {}
        changes["one_place"] = lambda micro: _one_place(micro, self._text.images.image_token_id)
        for name, change in changes.items():
            logprobs[name] = self.recompute(trajectories, change)
        logprobs["base"] = self.recompute(trajectories, adapter=False)
        return logprobs

    def loss(self, micro: MicroBatch, stats: UpdateStats) -> Tensor:
        """The weighted loss of a micro-batch, with that of a critic on the policy's hidden states; adds to `stats`."""
        settings = self._settings
        new, entropy, values = self.logprobs(micro, self._entropy)
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


def lr_factor(learner: OptimizerSection, number: int, last: int) -> float:
    """The share of `learner.lr` in iteration (or step) 0, 1, ... `last`."""
    if learner.lr_schedule == "constant":
        return 1.0
    return float(np.interp(number, [0, max(last, 1)], [1.0, learner.lr_final_fraction]))


def make_builder(policy: PolicyModel, learner: OptimizerSection) -> BatchBuilder:
    """What packs trajectories for a policy."""
    width = 0 if learner.attention == "dense" else policy.backbone.width
    share_prompts = learner.share_prompts and policy.backbone.packs
    return BatchBuilder(policy.text, learner.micro_batch_tokens, share_prompts, width)


def _shown(own: Trajectory, others: Sequence[EncodedImage]) -> Trajectory:
    """The trajectory with these images, as far as there are some, in place of its own, each as large as that."""
    images = [resized(there, here.width, here.height) for here, there in zip(own.images, others, strict=False)]
    return replace(own, images=(*images, *own.images[len(images) :]))
