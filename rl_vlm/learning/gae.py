"""GAE: generalised advantage estimation (arXiv 1506.02438) over tokens, over turns, or over tokens inside turns.

An episode ends with its last turn, also where a limit cut it off: no value is added for what might have come.
"""

from __future__ import annotations

import numpy as np

from rl_vlm.config.algorithm import AlgorithmSection
from rl_vlm.learning.estimators import (
    Estimate,
    EstimatorError,
    Experience,
    flat,
    register_estimator,
    turn_lengths,
)
from rl_vlm.statistics import are_equal

Advantages = tuple[np.ndarray, np.ndarray]  # advantages and returns, float64 [T]; returns NaN where nothing is learned


@register_estimator("gae")
def generalized_advantages(experience: Experience, settings: AlgorithmSection) -> Estimate:
    """Advantages and returns of every sampled token from the critic's values; see `gae_level` for what a step is.

    `advantage_normalization: std` makes mean 0 and standard deviation 1 over all tokens of the batch, as PPO's
    implementations do.
    """
    if experience.values is None:
        raise EstimatorError("algorithm.estimator gae needs a critic: set algorithm.name to ppo.")
    advantages, returns = [], []
    for g, group in enumerate(experience.groups):
        group_advantages, group_returns = [], []
        for k, trajectory in enumerate(group.trajectories):
            lengths = turn_lengths(trajectory)
            values = experience.values[g][k].astype(np.float64)
            token_rewards = np.zeros(len(values))
            if experience.token_rewards is not None:
                token_rewards += experience.token_rewards[g][k]
            if len(values):
                found = trajectory_gae(experience.turn_rewards[g][k], token_rewards, values, lengths, settings)
            else:
                found = (np.zeros(0), np.zeros(0))
            group_advantages.append(found[0])
            group_returns.append(found[1].astype(np.float32))
        advantages.append(group_advantages)
        returns.append(group_returns)
    mean, scale = 0.0, settings.advantage_scale
    tokens = flat(advantages)
    if settings.advantage_normalization == "std" and len(tokens) > 1:
        mean, scale = tokens.mean(), 0.0 if are_equal(tokens) else scale / (tokens.std(ddof=1) + 1e-8)
    return Estimate(
        [[((tokens - mean) * scale).astype(np.float32) for tokens in group] for group in advantages], returns
    )


def trajectory_gae(
    turn_rewards: np.ndarray,
    token_rewards: np.ndarray,
    values: np.ndarray,
    lengths: np.ndarray,
    settings: AlgorithmSection,
) -> Advantages:
    """One trajectory: float64 turn_rewards [K], token_rewards [T], values [T]; lengths int64 [K] of its turns, none 0.

    "token": the turn's reward is paid with its last token; turns follow each other without a break.
    "turn": a turn is one action with one value, that of the state before its first token; all of its tokens share an advantage.
    "bilevel" (VAGEN, arXiv 2510.16907): turns first, with the values before their last tokens; then inside each turn
    GAE over tokens from the turn's advantage at its last token backwards.
    """
    gamma, lam = settings.gamma, settings.gae_lambda
    turn_gamma, turn_lam = settings.turn_gamma, settings.turn_lambda
    last = np.cumsum(lengths) - 1
    if settings.gae_level == "token":
        rewards = token_rewards.copy()
        rewards[last] += turn_rewards
        advantages = gae(rewards, values, gamma, lam)
        return advantages, advantages + values
    if settings.gae_level == "turn":
        first = last - lengths + 1
        rewards = turn_rewards + np.add.reduceat(token_rewards, first)
        of_turns = gae(rewards, values[first], turn_gamma, turn_lam)
        returns = np.full(len(values), np.nan)
        returns[first] = of_turns + values[first]
        return np.repeat(of_turns, lengths), returns
    of_turns = gae(turn_rewards + token_rewards[last], values[last], turn_gamma, turn_lam)
    advantages = np.empty(len(values))
    for advantage, end, length in zip(of_turns, last, lengths, strict=True):
        inside = slice(end - length + 1, end + 1)
        rewards = token_rewards[inside].copy()
        rewards[-1] = advantage + values[end]
        advantages[inside] = gae(rewards, values[inside], gamma, lam)
    return advantages, advantages + values


def gae(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> np.ndarray:
    """Advantages float64 [T] of one episode that ends after its last reward.

    A_t = δ_t + γλ A_{t+1} with δ_t = r_t + γ V_{t+1} - V_t (equations 11 and 16 of the paper).
    """
    deltas = rewards - values
    deltas[:-1] += gamma * values[1:]
    advantages = np.empty(len(deltas))
    following = 0.0
    for step in range(len(deltas) - 1, -1, -1):
        following = deltas[step] + gamma * lam * following
        advantages[step] = following
    return advantages
