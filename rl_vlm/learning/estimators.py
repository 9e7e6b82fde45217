"""Advantage estimators: complete groups in, one advantage per sampled token out. Users register more.

Shapes: G trajectories in a group, K turns and T sampled tokens in a trajectory; arrays are by trajectory id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from rl_vlm.config.learner import AlgorithmSection
from rl_vlm.learning.experience import Arrays, Estimate, EstimatorError, Experience, flat, turn_lengths
from rl_vlm.learning.gae import gae, trajectory_gae
from rl_vlm.registry import Registry
from rl_vlm.statistics import are_equal
from rl_vlm.types import Trajectory

AdvantageEstimator = Callable[[Experience, AlgorithmSection], Estimate]

ESTIMATORS: Registry[AdvantageEstimator] = Registry("algorithm.estimator")
register_estimator = ESTIMATORS.register


def group_advantages(
    rewards: np.ndarray, normalization: Literal["std", "none"] = "std", scale: float = 1.0, eps: float = 1e-6
) -> np.ndarray:
    """Advantages float64 [G] of one group: reward minus the group's mean.

    "std" divides by the unbiased standard deviation plus `eps` (GRPO: DeepSeekMath, arXiv 2402.03300, section 4.1);
    "none" does not (Dr. GRPO: arXiv 2503.20783).
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    if are_equal(rewards):  # rounding noise divided by its own tiny deviation would look like a signal
        return np.zeros_like(rewards)
    centred = rewards - rewards.mean()
    if normalization == "std":
        centred = centred / (rewards.std(ddof=1) + eps)
    return np.asarray(centred * scale)


@register_estimator("group")
def group_mean(experience: Experience, settings: AlgorithmSection) -> Estimate:
    """GRPO: each trajectory is compared with the mean of its group; all of its tokens get the same advantage."""
    normalization, scale = settings.advantage_normalization, settings.advantage_scale
    return same_for_all_tokens(experience, [group_advantages(r, normalization, scale) for r in experience.rewards])


@register_estimator("rloo")
def leave_one_out(experience: Experience, settings: AlgorithmSection) -> Estimate:
    """RLOO (arXiv 2402.14740, section 2.2): each trajectory is compared with the mean of the *others* of its group."""
    values = []
    for group_rewards in experience.rewards:
        size = len(group_rewards)
        # r - mean of the others = (r - mean of all) · G / (G - 1)
        centred = group_advantages(group_rewards, "none", settings.advantage_scale)
        values.append(centred * size / (size - 1) if size > 1 else centred)
    return same_for_all_tokens(experience, values)


@register_estimator("reinforce_pp")
def whole_batch(experience: Experience, settings: AlgorithmSection) -> Estimate:
    """REINFORCE++ (arXiv 2501.03262): the undiscounted return from each token on, normalised over all tokens of the
    batch. A turn is rewarded at its last token."""
    returns: Arrays = {}
    for trajectory in experience.trajectories:
        rewards = experience.rewards_of_tokens(trajectory)
        rewards[_last_tokens(trajectory)] += experience.turn_rewards[trajectory.trajectory_id]
        returns[trajectory.trajectory_id] = rewards[::-1].cumsum()[::-1]
    return Estimate(_normalized(returns, settings.advantage_scale))


@register_estimator("reinforce_pp_baseline")
def group_mean_over_whole_batch(experience: Experience, settings: AlgorithmSection) -> Estimate:
    """REINFORCE++ with a baseline (arXiv 2501.03262): minus the group's mean, then normalised over all tokens."""
    centred = same_for_all_tokens(experience, [group_advantages(rewards, "none") for rewards in experience.rewards])
    return Estimate(_normalized(centred.advantages, settings.advantage_scale))


@register_estimator("gigpo")
def same_state(experience: Experience, settings: AlgorithmSection) -> Estimate:
    """GiGPO (arXiv 2505.10978): the advantage of the trajectory in its group plus, with the weight `gigpo_step_weight`,
    that of a turn's discounted return among all turns of the group that began in its state. An empty state is alone."""

    def relative(compared: np.ndarray) -> np.ndarray:
        return group_advantages(compared, settings.advantage_normalization, settings.advantage_scale)

    advantages: Arrays = {}
    for group, totals in zip(experience.groups, experience.rewards, strict=True):
        rewards = []
        for trajectory in group.trajectories:  # with what each turn's tokens add
            parts = np.split(experience.rewards_of_tokens(trajectory), _last_tokens(trajectory) + 1)[:-1]
            rewards.append(experience.turn_rewards[trajectory.trajectory_id] + np.array([part.sum() for part in parts]))
        returns = np.concatenate([gae(turns, np.zeros(len(turns)), settings.gigpo_gamma, 1.0) for turns in rewards])
        states = np.array([turn.state_id for trajectory in group.trajectories for turn in trajectory.turns])
        step = np.zeros(len(returns))
        for state in set(states.tolist()) - {""}:
            step[states == state] = relative(returns[states == state])
        per_turn = np.repeat(relative(totals), list(map(len, rewards))) + settings.gigpo_step_weight * step
        lengths = np.concatenate([turn_lengths(trajectory) for trajectory in group.trajectories])
        ends = np.cumsum([trajectory.num_sampled for trajectory in group.trajectories])[:-1]
        parts = np.split(np.repeat(per_turn, lengths).astype(np.float32), ends)
        advantages |= {one.trajectory_id: part for one, part in zip(group.trajectories, parts, strict=True)}
    return Estimate(advantages)


def _last_tokens(trajectory: Trajectory) -> np.ndarray:
    """Each turn's last token among the sampled ones, int64 [K]."""
    return np.cumsum(turn_lengths(trajectory)) - 1


def _normalized(values: Arrays, scale: float, *, ddof: int = 0, eps: float = 1e-6) -> Arrays:
    """(value - mean) / (standard deviation + eps) · scale over all tokens, float32; zeros for equal values."""
    every = flat(values)
    if are_equal(every):
        return {name: np.zeros(len(tokens), dtype=np.float32) for name, tokens in values.items()}
    mean, scale = every.mean(), scale / (every.std(ddof=ddof) + eps)
    return {name: ((tokens - mean) * scale).astype(np.float32) for name, tokens in values.items()}


def same_for_all_tokens(experience: Experience, values: Sequence[np.ndarray]) -> Estimate:
    """One number per trajectory, `values` float64 [G] per group, given to each of its tokens."""
    every = np.concatenate([*values, np.zeros(0)])
    return Estimate(
        {
            trajectory.trajectory_id: np.full(trajectory.num_sampled, value, dtype=np.float32)
            for trajectory, value in zip(experience.trajectories, every, strict=True)
        }
    )


@register_estimator("gae")
def generalized_advantages(experience: Experience, settings: AlgorithmSection) -> Estimate:
    """Advantages and returns of every sampled token from the critic's values; see `gae_level` for what a step is.

    `advantage_normalization: std` is over all tokens of the batch, as in PPO's implementations.
    """
    if not experience.values:
        raise EstimatorError("algorithm.estimator gae needs a critic: set algorithm.name to ppo.")
    advantages, returns = Arrays(), Arrays()
    for trajectory in experience.trajectories:
        name = trajectory.trajectory_id
        advantages[name] = returns[name] = np.zeros(0, dtype=np.float32)
        if trajectory.num_sampled:
            advantages[name], targets = trajectory_gae(
                experience.turn_rewards[name],
                experience.rewards_of_tokens(trajectory),
                experience.values[name].astype(np.float64),
                turn_lengths(trajectory),
                settings,
            )
            returns[name] = targets.astype(np.float32)
    if settings.advantage_normalization == "std":
        return Estimate(_normalized(advantages, settings.advantage_scale, ddof=1, eps=1e-8), returns)
    scale = settings.advantage_scale
    return Estimate({name: (tokens * scale).astype(np.float32) for name, tokens in advantages.items()}, returns)
