"""Plans an update: the advantages of trajectory groups, and each learner's share of each optimiser step. No Ray, no torch.

The order is: `divide` the groups and let the learners score them where an estimator needs that; `make_experience` of the groups and
the scores; `estimate_advantages`; `update_batches` for the learners. Where no scores are needed the groups are divided after the
estimate, so that samples without an advantage are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

import rl_vlm.learning.gae  # noqa: F401  # registers an estimator
from rl_vlm.config.algorithm import AlgorithmSection
from rl_vlm.learning.batching import Minibatch
from rl_vlm.learning.estimators import ESTIMATORS, Estimate, Experience, PerToken
from rl_vlm.learning.messages import Scores, UpdateBatch
from rl_vlm.learning.returns import ReturnScale
from rl_vlm.types import TrajectoryGroup


def estimate_advantages(experience: Experience, settings: AlgorithmSection) -> Estimate:
    """What the configured estimator makes of the groups, checked. Raises EstimatorError."""
    estimate = ESTIMATORS.get(settings.estimator)(experience, settings)
    means, learns = estimate.summary(_sampled_lengths(experience.groups), settings.estimator)
    return replace(estimate, means=means, learns=learns)


def divide(
    groups: Sequence[TrajectoryGroup],
    settings: AlgorithmSection,
    rng: np.random.Generator,
    estimate: Estimate | None = None,
    *,
    num_learners: int = 1,
    max_new_tokens: int = 1,
) -> list[list[Minibatch]]:
    """Divide groups into the steps of an epoch and these among learners: `[learner][step]`. `max_new_tokens` is aggregation "constant"'s.

    Every step's weights are normalised over the whole step, all learners and skipped samples included, so neither the
    number of learners nor the skipping changes the gradient. Samples with zero advantage are skipped unless a KL penalty or
    an entropy bonus gives them a gradient. Without `estimate` no advantage is known yet, and none is skipped.
    """
    lengths = _sampled_lengths(groups)
    order = rng.permutation(len(groups))
    minibatches: list[list[Minibatch]] = [[] for _ in range(num_learners)]
    skips = estimate is not None and not settings.learns_without_advantage
    for members in np.array_split(order, min(settings.minibatches, max(len(groups), 1))):
        weight = _weights([length for k in members for length in lengths[k]], settings.aggregation, max_new_tokens)
        step = [Minibatch([], {}) for _ in range(num_learners)]
        load = [0] * num_learners
        kept = {
            k: [
                one
                for n, one in enumerate(groups[k].trajectories)
                if lengths[k][n] and (not skips or (estimate is not None and estimate.learns[k][n]))
            ]
            for k in members
        }
        # Longest first onto the least loaded learner keeps the learners' work even.
        for k in sorted(members, key=lambda k: -sum(map(len, kept[k]))):
            if kept[k]:
                learner = load.index(min(load))
                step[learner].groups.append(kept[k])
                step[learner].weights |= {one.trajectory_id: weight(one.num_sampled) for one in kept[k]}
                load[learner] += sum(map(len, kept[k]))
        for learner, minibatch in enumerate(step):
            minibatches[learner].append(minibatch)
    return minibatches


def update_batches(
    minibatches: Sequence[Sequence[Minibatch]],
    groups: Sequence[TrajectoryGroup],
    estimate: Estimate,
    scale: ReturnScale | None = None,
    *,
    scored: bool = False,
    **how: Any,
) -> list[UpdateBatch]:
    """Each learner's share of an update from `divide`'s minibatches; returns are normalised by `scale`.

    `scored`: the learners have packed the minibatches already, so these are not sent again. `how`: fields of UpdateBatch that are
    equal for all learners.
    """
    advantages, returns = {}, {}
    for g, group in enumerate(groups):
        for k, trajectory in enumerate(group.trajectories):
            advantages[trajectory.trajectory_id] = estimate.advantages[g][k]
            if estimate.returns is not None and scale is not None:
                raw = estimate.returns[g][k]
                returns[trajectory.trajectory_id] = ((raw - scale.mean) / scale.std).astype(np.float32)
    steps = list(zip(*minibatches, strict=True))
    active = [any(part.groups for part in step) for step in steps]
    value_weights = [
        1.0 / max(sum(int(np.isfinite(returns[name]).sum()) for part in step for name in part.weights if returns), 1)
        for step in steps
    ]
    shares = []
    for own in minibatches:
        names = [name for step in own for name in step.weights]
        shares.append(
            UpdateBatch(
                [] if scored else list(own),
                active,
                {name: advantages[name] for name in names},
                {name: returns[name] for name in names} if returns else {},
                value_weights,
                **how,
            )
        )
    return shares


def _sampled_lengths(groups: Sequence[TrajectoryGroup]) -> list[list[int]]:
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
