"""Plans an update: advantages of trajectory groups, and each learner's share of each optimiser step. No Ray, no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from rl_vlm.config.algorithm import AlgorithmSection
from rl_vlm.learning.batching import Minibatch, TrainSample
from rl_vlm.learning.estimators import ESTIMATORS, Experience
from rl_vlm.types import TrajectoryGroup


@dataclass(slots=True)
class UpdatePlan:
    """`shards[learner][step]` is a learner's part of a step; `active[step]` says whether any learner has one."""

    shards: list[list[Minibatch]]
    active: list[bool]
    advantages: list[np.ndarray]  # float64 [G] per group, in the order given: the mean over a trajectory's tokens
    zero_advantage_groups: int


def plan_update(
    groups: Sequence[TrajectoryGroup],
    settings: AlgorithmSection,
    rng: np.random.Generator,
    *,
    num_learners: int = 1,
    max_new_tokens: int = 1,
) -> UpdatePlan:
    """Compute advantages over complete groups and distribute the groups.

    `max_new_tokens` is the token budget of a trajectory, which aggregation "constant" and `overlong_buffer` use.

    Every step's weights are normalised over the whole step, all learners and skipped samples included, so neither the
    number of learners nor the skipping changes the gradient. Samples with zero advantage are skipped unless a KL penalty or
    an entropy bonus gives them a gradient.
    """
    experience = make_experience(groups, settings, rng, max_new_tokens=max_new_tokens)
    estimate = ESTIMATORS.get(settings.estimator)(experience, settings)
    lengths = [[trajectory.num_sampled for trajectory in group.trajectories] for group in groups]
    means, learns = estimate.summary(lengths, settings.estimator)
    order = rng.permutation(len(groups))
    shards: list[list[Minibatch]] = [[] for _ in range(num_learners)]
    active: list[bool] = []
    for members in np.array_split(order, min(settings.minibatches, max(len(groups), 1))):
        weight = _weights([length for k in members for length in lengths[k]], settings.aggregation, max_new_tokens)
        parts: list[list[list[TrainSample]]] = [[] for _ in range(num_learners)]
        load = [0] * num_learners
        samples = {
            k: [
                TrainSample(trajectory, advantage, weight(length))
                for trajectory, advantage, length, learned in zip(
                    groups[k].trajectories, estimate.advantages[k], lengths[k], learns[k], strict=True
                )
                if learned or (length and settings.learns_without_advantage)
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
    return UpdatePlan(shards, active, means, sum(not group.any() for group in learns))


def _weights(lengths: Sequence[int], aggregation: str, max_new_tokens: int) -> Callable[[int], float]:
    """The weight of each token loss of a trajectory, given the sampled tokens of all trajectories of the step, and its own."""
    sequences, tokens = len(lengths), sum(lengths)
    if aggregation == "sequence_mean":
        return lambda length: 1.0 / (length * sequences)
    if aggregation == "token_mean":
        return lambda length: 1.0 / tokens
    return lambda length: 1.0 / (max_new_tokens * sequences)


def make_experience(
    groups: Sequence[TrajectoryGroup],
    settings: AlgorithmSection,
    rng: np.random.Generator,
    *,
    max_new_tokens: int = 1,
) -> Experience:
    """What an estimator sees of the groups. `overlong_buffer` takes its penalty from a trajectory's last turn. With
    `shuffle_rewards`, a control with which nothing can be learned, the same total rewards are given to other trajectories,
    at their last turns.
    """
    turn_rewards = [
        [np.array([turn.reward for turn in trajectory.turns]) for trajectory in group.trajectories] for group in groups
    ]
    if settings.overlong_buffer:
        for group, rewards in zip(groups, turn_rewards, strict=True):
            for trajectory, turns in zip(group.trajectories, rewards, strict=True):
                turns[-1:] += overlong_penalty(trajectory.num_sampled, max_new_tokens, settings.overlong_buffer)
    if settings.shuffle_rewards:
        trajectories = [turns for rewards in turn_rewards for turns in rewards]
        for turns, total in zip(trajectories, rng.permutation([turns.sum() for turns in trajectories]), strict=True):
            turns[:] = 0
            turns[-1:] = total
    return Experience(groups, turn_rewards)


def overlong_penalty(length: int, max_new_tokens: int, buffer: int) -> float:
    """What DAPO adds to the reward of a trajectory of `length` sampled tokens (arXiv 2503.14476, equation 13).

    0 up to max_new_tokens - buffer, then linearly down to -1 at max_new_tokens.
    """
    return float(np.clip((max_new_tokens - buffer - length) / buffer, -1.0, 0.0))
