"""GiGPO: a turn is compared with other turns of its group that began in the same state (arXiv 2505.10978)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np


def step_returns(rewards: np.ndarray, gamma: float) -> np.ndarray:
    """The discounted sum of this and the later turns' rewards, float64 [K] from [K]."""
    returns = np.zeros(len(rewards))
    following = 0.0
    for turn in reversed(range(len(rewards))):
        following = rewards[turn] + gamma * following
        returns[turn] = following
    return returns


def gigpo_advantages(
    rewards: Sequence[np.ndarray],
    states: Sequence[Sequence[str]],
    relative: Callable[[np.ndarray], np.ndarray],
    *,
    gamma: float,
    step_weight: float,
) -> list[np.ndarray]:
    """The advantage of each turn of a group's trajectories, float64 [K] each.

    The episode-relative advantage of the trajectory's whole reward, plus `step_weight` times the
    step-relative advantage of the turn's discounted return among all turns of the group with the same state.

    Args:
        rewards: per trajectory, the rewards [K] of its turns.
        states: per trajectory, the state before each turn; an empty one is unknown and like no other.
        relative: advantages [n] of n rewards that are compared with each other; 0 for a single one.
        gamma: discount per turn.
        step_weight: ω.
    """
    episode = relative(np.array([turns.sum() for turns in rewards]))
    returns = [step_returns(turns, gamma) for turns in rewards]
    alike: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for number, names in enumerate(states):
        for turn, name in enumerate(names):
            if name:
                alike[name].append((number, turn))
    step = [np.zeros(len(turns)) for turns in rewards]
    for places in alike.values():
        compared = relative(np.array([returns[number][turn] for number, turn in places]))
        for (number, turn), advantage in zip(places, compared, strict=True):
            step[number][turn] = advantage
    return [whole + step_weight * turns for whole, turns in zip(episode, step, strict=True)]
