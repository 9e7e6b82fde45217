"""An update outside of RLlib: the updater that a run describes, and one optimiser step. Without Ray, for machines that have none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl_vlm.config import OptimizerSection, RunConfig
from rl_vlm.learning.batching import BatchBuilder
from rl_vlm.learning.padding import padding_batch
from rl_vlm.learning.stats import UpdateStats
from rl_vlm.learning.strategies.base import Strategy
from rl_vlm.learning.update import LossPass, MicroBatchLoss, PackedMinibatch, PolicyUpdater

if TYPE_CHECKING:
    from rl_vlm.learning.policy_model import PolicyModel  # with peft and all of transformers, for env runners too


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


def make_updater(policy: PolicyModel, run: RunConfig) -> PolicyUpdater:
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


def optimizer_step(
    strategy: Strategy,
    minibatch: PackedMinibatch,
    losses: MicroBatchLoss | Sequence[LossPass],
    max_grad_norm: float,
    stats: UpdateStats,
    groups: Sequence[int] | None = None,
) -> bool:
    """One optimiser step on the parameter groups (None: all); each loss is called as `loss(minibatch, number, stats)`.

    Returns whether it was taken: non-finite gradients are skipped.
    """
    for number in range(len(minibatch.micro_batches)):
        figures = stats if number < len(minibatch.counted) else UpdateStats()
        for one in [LossPass(losses)] if callable(losses) else losses:
            with one.within():
                strategy.backward(one.loss(minibatch, number, figures))
    norm = strategy.step(max_grad_norm, groups)
    if norm is None:
        stats.skipped_steps += 1
        return False
    stats.grad_norm += norm
    stats.steps += 1
    return True
