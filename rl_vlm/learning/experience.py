"""What an advantage estimator sees, and what it gives.

Shapes: G trajectories in a group, K turns and T sampled tokens in a trajectory; arrays are by trajectory id.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rl_vlm.types import RLVLMError, Trajectory, TrajectoryGroup

Arrays = dict[str, np.ndarray]  # by trajectory id


class EstimatorError(RLVLMError):
    """A registered estimator does not keep to the seam.

    Do: repair the estimator of your plugin.
    """


def turn_lengths(trajectory: Trajectory) -> np.ndarray:
    """Sampled tokens of each turn, int64 [K]."""
    return np.array([turn.stop - turn.start for turn in trajectory.turns], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Experience:
    """The whole batch, as estimators see it."""

    groups: Sequence[TrajectoryGroup]
    turn_rewards: Arrays  # float64 [K]
    token_rewards: Arrays = field(default_factory=dict)  # float32 [T], added to a token's reward; empty: no KL penalty
    values: Arrays = field(default_factory=dict)  # float32 [T], the critic's, of the state before each sampled token

    @property
    def trajectories(self) -> list[Trajectory]:
        return [trajectory for group in self.groups for trajectory in group.trajectories]

    def rewards_of_tokens(self, trajectory: Trajectory) -> np.ndarray:
        """The trajectory's `token_rewards`, float64 [T]; zeros without a penalty."""
        rewards = self.token_rewards.get(trajectory.trajectory_id)
        return np.zeros(trajectory.num_sampled) if rewards is None else rewards.astype(np.float64)

    @property
    def rewards(self) -> list[np.ndarray]:
        """The sum of a trajectory's rewards, those per token included: float64 [G] per group."""

        def total(one: Trajectory) -> float:
            return self.turn_rewards[one.trajectory_id].sum() + self.rewards_of_tokens(one).sum()

        return [np.array(list(map(total, group.trajectories))) for group in self.groups]


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the policy and the critic learn from."""

    advantages: Arrays  # float32 [T]
    returns: Arrays = field(default_factory=dict)  # float32 [T], NaN where nothing is learned; empty without a critic


def flat(values: Mapping[str, np.ndarray]) -> np.ndarray:
    """All tokens of the batch in one array, float64."""
    return np.concatenate([*values.values(), np.zeros(0)])
