"""Advantage estimators: complete groups in, one advantage per sampled token out. Users register more.

Shapes: G trajectories in a group, K turns and T sampled tokens in a trajectory. Per-token arrays of all trajectories are
lists: `values[group][trajectory]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from rl_vlm.config.algorithm import AlgorithmSection
from rl_vlm.learning.gigpo import gigpo_advantages
from rl_vlm.registry import Registry
from rl_vlm.statistics import are_equal
from rl_vlm.types import RLVLMError, Trajectory, TrajectoryGroup


class EstimatorError(RLVLMError):
    """A registered estimator does not keep to the seam."""


PerToken = list[list[np.ndarray]]


def flat(values: PerToken) -> np.ndarray:
    """All tokens of the batch in one array."""
    return np.concatenate([tokens for group in values for tokens in group] or [np.zeros(0)])


def turn_lengths(trajectory: Trajectory) -> np.ndarray:
    """Sampled tokens of each turn, int64 [K]."""
    return np.array([turn.stop - turn.start for turn in trajectory.turns], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Experience:
    """The whole batch, as estimators see it.

    turn_rewards: float64 [K] per trajectory; the environment's, unless a control has permuted them. token_rewards:
    float32 [T], what is added to the reward of a token (a KL penalty), or None. values: float32 [T], the critic's value of
    the state before each sampled token, or None without a critic.
    """

    groups: Sequence[TrajectoryGroup]
    turn_rewards: list[list[np.ndarray]]
    token_rewards: PerToken | None = None
    values: PerToken | None = None

    @property
    def rewards(self) -> list[np.ndarray]:
        """The sum of a trajectory's rewards, those per token included: float64 [G] per group."""
        totals = [np.array([turns.sum() for turns in group]) for group in self.turn_rewards]
        if self.token_rewards is not None:
            for total, group in zip(totals, self.token_rewards, strict=True):
                total += [tokens.sum(dtype=np.float64) for tokens in group]
        return totals


@dataclass(frozen=True, slots=True)
class Estimate:
    """In the order of the groups and trajectories that were given.

    advantages: float32 [T]. returns: float32 [T], what the critic learns to predict before each token, NaN where nothing;
    None without a critic. Filled in by `plan.estimate_advantages`, not by estimators: means float64 [G] per group, the mean advantage
    over a trajectory's tokens; learns bool [G], whether any is not zero.
    """

    advantages: PerToken
    returns: PerToken | None = None
    means: list[np.ndarray] = field(default_factory=list)
    learns: list[np.ndarray] = field(default_factory=list)

    def summary(self, lengths: list[list[int]], name: str) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Per group: the trajectories' mean advantages float64 [G], 0 without a sampled token, and bool [G]: any not zero.

        Raises EstimatorError where a user's estimator gave something else than finite numbers, one per sampled token;
        `lengths` holds the numbers of sampled tokens.
        """
        if [[np.shape(tokens) for tokens in group] for group in self.advantages] != [
            [(length,) for length in group] for group in lengths
        ]:
            raise EstimatorError(
                f"algorithm.estimator {name}: it must give one array per trajectory, one number per sampled token."
            )
        # One array for the whole batch: numpy's calls cost more than its work on thousands of short ones.
        flat_lengths = np.array([length for group in lengths for length in group], dtype=np.int64)
        means, learns = np.zeros(len(flat_lengths)), np.zeros(len(flat_lengths), dtype=bool)
        sampled = flat_lengths > 0
        if sampled.any():
            tokens = flat(self.advantages).astype(np.float64)
            if not np.isfinite(tokens).all():
                raise EstimatorError(f"algorithm.estimator {name}: it gave a number that is not finite.")
            starts = np.cumsum(flat_lengths[sampled]) - flat_lengths[sampled]
            means[sampled] = np.add.reduceat(tokens, starts) / flat_lengths[sampled]
            learns[sampled] = np.logical_or.reduceat(tokens != 0, starts)
        ends = np.cumsum([len(group) for group in lengths])[:-1]
        return np.split(means, ends), np.split(learns, ends)


AdvantageEstimator = Callable[[Experience, AlgorithmSection], Estimate]

ESTIMATORS: Registry[AdvantageEstimator] = Registry("algorithm.estimator")
register_estimator = ESTIMATORS.register


def group_advantages(
    rewards: np.ndarray, normalization: Literal["std", "none"] = "std", scale: float = 1.0, eps: float = 1e-6
) -> np.ndarray:
    """Advantages float64 [G] of one group: reward minus the group's mean.

    "std" divides by the unbiased standard deviation plus `eps` (GRPO: DeepSeekMath, arXiv 2402.03300, section 4.1);
    "none" does not (Dr. GRPO: arXiv 2503.20783). Rewards that are equal but for rounding give exactly zero, and so does a group of one.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    if are_equal(rewards):
        # The floating-point mean of equal numbers need not be that number, and rounding divided by its deviation would be a signal.
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
    """REINFORCE++ (arXiv 2501.03262): the return of each token, normalised over all tokens of the batch.

    The undiscounted sum of the rewards from the token on. A turn is paid at its last token; a KL penalty is part of
    `token_rewards`. No group's mean is subtracted.
    """
    returns: PerToken = []
    for number, group in enumerate(experience.groups):
        returns.append([])
        for place, trajectory in enumerate(group.trajectories):
            rewards = np.zeros(trajectory.num_sampled)
            if experience.token_rewards is not None:
                rewards += experience.token_rewards[number][place]
            rewards[_last_tokens(trajectory)] += experience.turn_rewards[number][place]
            returns[-1].append(rewards[::-1].cumsum()[::-1])
    return Estimate(_normalized(returns, settings.advantage_scale))


@register_estimator("reinforce_pp_baseline")
def group_mean_over_whole_batch(experience: Experience, settings: AlgorithmSection) -> Estimate:
    """REINFORCE++ with a baseline (arXiv 2501.03262): minus the group's mean, then normalised over all tokens of the batch."""
    centred = same_for_all_tokens(experience, [group_advantages(rewards, "none") for rewards in experience.rewards])
    return Estimate(_normalized(centred.advantages, settings.advantage_scale))


@register_estimator("gigpo")
def same_state(experience: Experience, settings: AlgorithmSection) -> Estimate:
    """GiGPO (arXiv 2505.10978): beside whole trajectories, turns that began in the same state are compared (gigpo.py)."""
    advantages: PerToken = []
    for group, rewards in zip(experience.groups, _rewards_per_turn(experience), strict=True):
        per_turn = gigpo_advantages(
            rewards,
            [[turn.state_id for turn in trajectory.turns] for trajectory in group.trajectories],
            lambda compared: group_advantages(compared, settings.advantage_normalization, settings.advantage_scale),
            gamma=settings.gigpo_gamma,
            step_weight=settings.gigpo_step_weight,
        )
        advantages.append(
            [
                np.repeat(turns, turn_lengths(trajectory)).astype(np.float32)
                for turns, trajectory in zip(per_turn, group.trajectories, strict=True)
            ]
        )
    return Estimate(advantages)


def _rewards_per_turn(experience: Experience) -> list[list[np.ndarray]]:
    """The turns' rewards with those of their tokens, float64 [K] per trajectory."""
    if experience.token_rewards is None:
        return experience.turn_rewards
    return [
        [
            turns
            + np.array([part.sum(dtype=np.float64) for part in np.split(tokens, _last_tokens(trajectory) + 1)[:-1]])
            for turns, tokens, trajectory in zip(rewards, per_token, group.trajectories, strict=True)
        ]
        for group, rewards, per_token in zip(
            experience.groups, experience.turn_rewards, experience.token_rewards, strict=True
        )
    ]


def _last_tokens(trajectory: Trajectory) -> np.ndarray:
    """The place of each turn's last token among the sampled ones, int64 [K]."""
    return np.cumsum(turn_lengths(trajectory)) - 1


def _normalized(values: PerToken, scale: float, eps: float = 1e-6) -> PerToken:
    """(value - mean) / (standard deviation + eps) · scale over all tokens, float32. Values that are equal but for rounding give exactly zero."""
    every = flat(values).astype(np.float64)
    if are_equal(every):
        return [[np.zeros(len(tokens), dtype=np.float32) for tokens in group] for group in values]
    mean, deviation = every.mean(), every.std()
    return [[((tokens - mean) / (deviation + eps) * scale).astype(np.float32) for tokens in group] for group in values]


def same_for_all_tokens(experience: Experience, values: Sequence[np.ndarray]) -> Estimate:
    """One number per trajectory, `values` float64 [G] per group, given to each of its tokens."""
    return Estimate(
        [
            [
                np.full(trajectory.num_sampled, value, dtype=np.float32)
                for trajectory, value in zip(group.trajectories, group_values, strict=True)
            ]
            for group, group_values in zip(experience.groups, values, strict=True)
        ]
    )
