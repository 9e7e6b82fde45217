"""From trajectory groups to what each learner does in each optimiser step. Pure and exact: no Ray, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl_vlm.learning.advantages import Normalization, group_advantages
from rl_vlm.learning.batching import Minibatch, TrainSample
from rl_vlm.types import TrajectoryGroup


@dataclass(frozen=True, slots=True)
class PlanConfig:
    """How groups become optimiser steps. `aggregation` is the loss's (see losses.py)."""

    aggregation: str
    minibatches: int
    num_learners: int
    advantage_normalization: Normalization = "std"
    advantage_scale: float = 1.0
    max_new_tokens: int = 1  # the constant of aggregation "constant"
    keep_zero_advantage: bool = False  # needed when a KL penalty or an entropy bonus gives them a gradient
    shuffle_rewards: bool = False


@dataclass(slots=True)
class UpdatePlan:
    """`shards[learner][step]` is a learner's part of a step; `active[step]` says whether any learner has one."""

    shards: list[list[Minibatch]]
    active: list[bool]
    advantages: list[np.ndarray]  # per group, in the order given
    zero_advantage_groups: int


def plan_update(groups: Sequence[TrajectoryGroup], config: PlanConfig, rng: np.random.Generator) -> UpdatePlan:
    """Compute advantages over complete groups and deal the groups out.

    Every step's weights are normalised over the whole step, all learners and skipped samples included, so neither the
    number of learners nor the skipping changes the gradient. Samples with zero advantage are skipped.
    """
    rewards = [group.rewards for group in groups]
    if config.shuffle_rewards:
        rewards = _shuffled(rewards, rng)
    advantages = [group_advantages(r, config.advantage_normalization, config.advantage_scale) for r in rewards]
    order = rng.permutation(len(groups))
    shards: list[list[Minibatch]] = [[] for _ in range(config.num_learners)]
    active: list[bool] = []
    for members in np.array_split(order, min(config.minibatches, max(len(groups), 1))):
        weight = _weights([groups[k] for k in members], config)
        parts: list[list[list[TrainSample]]] = [[] for _ in range(config.num_learners)]
        load = [0] * config.num_learners
        samples = {
            k: [
                TrainSample(trajectory, float(advantage), weight(trajectory.num_sampled))
                for trajectory, advantage in zip(groups[k].trajectories, advantages[k], strict=True)
                if trajectory.num_sampled and (advantage != 0 or config.keep_zero_advantage)
            ]
            for k in members
        }
        # Longest first onto the least loaded learner keeps the learners' work even.
        for k in sorted(members, key=lambda k: -sum(len(s.trajectory) for s in samples[k])):
            if samples[k]:
                learner = load.index(min(load))
                parts[learner].append(samples[k])
                load[learner] += sum(len(sample.trajectory) for sample in samples[k])
        for learner, part in enumerate(parts):
            shards[learner].append(Minibatch(part))
        active.append(any(parts))
    zero = sum(not np.any(a) for a in advantages)
    return UpdatePlan(shards, active, advantages, zero)


def _weights(groups: Sequence[TrajectoryGroup], config: PlanConfig):  # type: ignore[no-untyped-def]
    sequences = sum(len(group) for group in groups)
    tokens = sum(trajectory.num_sampled for group in groups for trajectory in group.trajectories)
    if config.aggregation == "sequence_mean":
        return lambda length: 1.0 / (length * sequences)
    if config.aggregation == "token_mean":
        return lambda length: 1.0 / tokens
    return lambda length: 1.0 / (config.max_new_tokens * sequences)


def _shuffled(rewards: list[np.ndarray], rng: np.random.Generator) -> list[np.ndarray]:
    """The control that must fail: the same rewards, given to other trajectories."""
    mixed = rng.permutation(np.concatenate(rewards))
    return list(np.split(mixed, np.cumsum([len(r) for r in rewards])[:-1]))
