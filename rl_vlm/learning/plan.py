"""Plans an update: advantages of trajectory groups, and each learner's share of each optimiser step. No Ray, no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

import rl_vlm.learning.gae  # noqa: F401  # registers an estimator
from rl_vlm.config.algorithm import AlgorithmSection
from rl_vlm.learning.batching import Minibatch, TrainSample
from rl_vlm.learning.estimators import ESTIMATORS, Estimate, Experience, PerToken
from rl_vlm.learning.returns import ReturnScale
from rl_vlm.learning.scores import Scores, Targets
from rl_vlm.types import TrajectoryGroup


@dataclass(slots=True)
class Shards:
    """`minibatches[learner][step]` is a learner's part of a step; `active[step]` says whether any learner has one."""

    minibatches: list[list[Minibatch]]
    active: list[bool]


@dataclass(slots=True)
class Credit:
    """What an estimator made of the groups, in their order.

    means: float64 [G] per group, the mean advantage over a trajectory's tokens. learns: bool [G], whether any is not zero.
    """

    estimate: Estimate
    means: list[np.ndarray]
    learns: list[np.ndarray]

    @property
    def zero_advantage_groups(self) -> int:
        """How many groups have no gradient."""
        return sum(not group.any() for group in self.learns)


def assign_credit(experience: Experience, settings: AlgorithmSection) -> Credit:
    """The advantages of the configured estimator, checked. Raises EstimatorError."""
    estimate = ESTIMATORS.get(settings.estimator)(experience, settings)
    means, learns = estimate.summary(sampled_lengths(experience.groups), settings.estimator)
    return Credit(estimate, means, learns)


def distribute(
    groups: Sequence[TrajectoryGroup],
    settings: AlgorithmSection,
    rng: np.random.Generator,
    credit: Credit | None = None,
    *,
    num_learners: int = 1,
    max_new_tokens: int = 1,
) -> Shards:
    """Divide groups into the steps of an epoch and these among learners. `max_new_tokens` is aggregation "constant"'s.

    Every step's weights are normalised over the whole step, all learners and skipped samples included, so neither the
    number of learners nor the skipping changes the gradient. Samples with zero advantage are skipped unless a KL penalty or
    an entropy bonus gives them a gradient. Without `credit` no advantage is known yet, and none is skipped.
    """
    lengths = sampled_lengths(groups)
    order = rng.permutation(len(groups))
    minibatches: list[list[Minibatch]] = [[] for _ in range(num_learners)]
    active: list[bool] = []
    for members in np.array_split(order, min(settings.minibatches, max(len(groups), 1))):
        weight = _weights([length for k in members for length in lengths[k]], settings.aggregation, max_new_tokens)
        parts: list[list[list[TrainSample]]] = [[] for _ in range(num_learners)]
        load = [0] * num_learners
        samples = {k: _samples(groups[k], lengths[k], k, weight, settings, credit) for k in members}
        # Longest first onto the least loaded learner keeps the learners' work even.
        for k in sorted(members, key=lambda k: -sum(len(s.trajectory) for s in samples[k])):
            if samples[k]:
                learner = load.index(min(load))
                parts[learner].append(samples[k])
                load[learner] += sum(len(sample.trajectory) for sample in samples[k])
        for learner, part in enumerate(parts):
            minibatches[learner].append(Minibatch(part))
        active.append(any(parts))
    return Shards(minibatches, active)


def _samples(
    group: TrajectoryGroup,
    lengths: list[int],
    place: int,
    weight: Callable[[int], float],
    settings: AlgorithmSection,
    credit: Credit | None,
) -> list[TrainSample]:
    if credit is None:
        advantages, learns = [np.zeros(length, dtype=np.float32) for length in lengths], np.ones(len(group), dtype=bool)
    else:
        advantages, learns = credit.estimate.advantages[place], credit.learns[place]
    return [
        TrainSample(trajectory, advantage, weight(length))
        for trajectory, advantage, length, learned in zip(group.trajectories, advantages, lengths, learns, strict=True)
        if length and (learned or settings.learns_without_advantage)
    ]


@dataclass(slots=True)
class UpdatePlan(Shards):
    """Shards whose advantages are known."""

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
    """Compute advantages that need nothing from the learners, and distribute the groups.

    `max_new_tokens` is the token budget of a trajectory, which aggregation "constant" and `overlong_buffer` use.
    """
    credit = assign_credit(make_experience(groups, settings, rng, max_new_tokens=max_new_tokens), settings)
    shards = distribute(groups, settings, rng, credit, num_learners=num_learners, max_new_tokens=max_new_tokens)
    return UpdatePlan(shards.minibatches, shards.active, credit.means, credit.zero_advantage_groups)


def targets_of(experience: Experience, credit: Credit, shards: Shards, scale: ReturnScale) -> list[Targets]:
    """Each learner's targets for the minibatches of `distribute`; returns are normalised by `scale`. Raises EstimatorError."""
    advantages, returns = {}, {}
    for g, group in enumerate(experience.groups):
        for k, trajectory in enumerate(group.trajectories):
            advantages[trajectory.trajectory_id] = credit.estimate.advantages[g][k]
            if credit.estimate.returns is not None:
                raw = credit.estimate.returns[g][k]
                returns[trajectory.trajectory_id] = ((raw - scale.mean) / scale.std).astype(np.float32)
    ids = [
        [[s.trajectory.trajectory_id for group in step.groups for s in group] for step in learner]
        for learner in shards.minibatches
    ]
    weights = []
    for step in range(len(shards.active)):
        known = sum(int(np.isfinite(returns[i]).sum()) for learner in ids for i in learner[step]) if returns else 0
        weights.append(1.0 / max(known, 1))
    return [
        Targets(
            {i: advantages[i] for step in learner for i in step},
            {i: returns[i] for step in learner for i in step} if returns else {},
            weights,
        )
        for learner in ids
    ]


def sampled_lengths(groups: Sequence[TrajectoryGroup]) -> list[list[int]]:
    """The numbers of sampled tokens per group and trajectory."""
    return [[trajectory.num_sampled for trajectory in group.trajectories] for group in groups]


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
    scores: Scores | None = None,
    *,
    max_new_tokens: int = 1,
    kl_coef: float = 0.0,
    scale: ReturnScale | None = None,
) -> Experience:
    """What an estimator sees of the groups. `overlong_buffer` takes its penalty from a trajectory's last turn.

    With `shuffle_rewards`, a control with which nothing can be learned, the same total rewards are given to other
    trajectories, at their last turns. From the learners' `scores` come the values, as returns by `scale`, and the penalty
    -kl_coef (old - reference) of each token.
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
    penalties = values = None
    if scores is not None and settings.kl_in_reward:
        penalties = _per_token(groups, scores.log_ratio, lambda tokens: -kl_coef * tokens)
    if scores is not None and scale is not None and scores.values:
        values = _per_token(groups, scores.values, lambda tokens: tokens * scale.std + scale.mean)
    return Experience(groups, turn_rewards, penalties, values)


def _per_token(
    groups: Sequence[TrajectoryGroup], arrays: Mapping[str, np.ndarray], change: Callable[[np.ndarray], np.ndarray]
) -> PerToken:
    """Arrays by trajectory id in the order of the groups; a trajectory without a sampled token has none."""
    nothing = np.zeros(0, dtype=np.float32)
    return [
        [change(arrays.get(trajectory.trajectory_id, nothing)) for trajectory in group.trajectories] for group in groups
    ]


def overlong_penalty(length: int, max_new_tokens: int, buffer: int) -> float:
    """What DAPO adds to the reward of a trajectory of `length` sampled tokens (arXiv 2503.14476, equation 13).

    0 up to max_new_tokens - buffer, then linearly down to -1 at max_new_tokens.
    """
    return float(np.clip((max_new_tokens - buffer - length) / buffer, -1.0, 0.0))
