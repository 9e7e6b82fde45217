"""GAE: generalised advantage estimation (arXiv 1506.02438) over tokens, over turns, or over tokens inside turns.

An episode ends with its last turn, also where a limit cut it off: no value is added for what might have come.
"""

from __future__ import annotations

import numpy as np

from rl_vlm.config.learner import AlgorithmSection

Advantages = tuple[np.ndarray, np.ndarray]  # advantages and returns, float64 [T]; returns NaN where nothing is learned


def trajectory_gae(
    turn_rewards: np.ndarray,
    token_rewards: np.ndarray,
    values: np.ndarray,
    lengths: np.ndarray,
    settings: AlgorithmSection,
) -> Advantages:
    """One trajectory: float64 turn_rewards [K], token_rewards [T], values [T]; lengths int64 [K] of its turns, none 0.

    "token": the turn's reward comes with its last token; turns follow each other without a break.
    "turn": a turn is one action with one value, that of the state before its first token; all of its tokens share an
    advantage. "bilevel" (VAGEN, arXiv 2510.16907): turns first, with the values before their last tokens; then inside
    each turn GAE over tokens from the turn's advantage at its last token backwards.
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
