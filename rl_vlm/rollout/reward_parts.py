"""Parts of the reward that are computed when a group is complete, from all its answers. Users register more:

    @register_reward_part("brief")
    def brief(answered):
        return [-float(len(answers[-1].split())) for answers in answered.answers]

`env.reward.weights: {env: 1.0, brief: 0.01}` then adds the weighted value to each episode's last turn. A function that
waits for something, as the judge does, is `async def`: the groups of a worker wait side by side.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl_vlm.asking import Client
from rl_vlm.config import RewardSection
from rl_vlm.models.images import TextSide
from rl_vlm.registry import Registry
from rl_vlm.types import TrajectoryGroup


@dataclass(frozen=True, slots=True)
class AnsweredGroup:
    """What a part sees: a complete group with the environment's own rewards, and `answers`, the text of each turn, per
    trajectory. A request to `policy` with `min_version` -1 is answered by the base model."""

    group: TrajectoryGroup
    answers: tuple[tuple[str, ...], ...]
    reward_settings: RewardSection
    policy: Client
    text: TextSide


@dataclass(frozen=True, slots=True)
class PartResult:
    """One number per trajectory, None where the part does not apply, and notes that are added to its `info`."""

    values: Sequence[float | None]
    notes: Sequence[Mapping[str, Any]]
    metrics: Mapping[str, float] = field(default_factory=dict)  # logged as parts that do not count


PartValues = Sequence[float | None] | PartResult
RewardPart = Callable[[AnsweredGroup], PartValues | Awaitable[PartValues]]

REWARD_PARTS: Registry[RewardPart] = Registry("env.reward.weights")
register_reward_part = REWARD_PARTS.register


@register_reward_part("format")
def format_share(answered: AnsweredGroup) -> list[float]:
    """The share of turns that are well-formed: not cut off, and not `well_formed: False` in the environment's info."""
    return [float(np.mean([turn.well_formed for turn in one.turns])) for one in answered.group.trajectories]


@register_reward_part("length")
def tokens_over_budget(answered: AnsweredGroup) -> list[float]:
    """Sampled tokens beyond `length_budget`; its weight is negative where long answers cost."""
    budget = answered.reward_settings.length_budget
    return [float(max(one.num_sampled - budget, 0)) for one in answered.group.trajectories]


@register_reward_part("relative_length")
def relative_length(answered: AnsweredGroup) -> list[float]:
    """The length reward of Kimi k1.5 (arXiv 2501.12599, section 2.3.3) over the whole group: λ = 0.5 - (length -
    shortest) / (longest - shortest) for a correct answer, min(0, λ) for a wrong one; 0 where all are equally long."""
    lengths = np.array([one.num_sampled for one in answered.group.trajectories], dtype=np.float64)
    spread = np.ptp(lengths)
    if not spread:
        return [0.0] * len(lengths)
    values = 0.5 - (lengths - lengths.min()) / spread
    correct = np.array([one.correct for one in answered.group.trajectories])
    return [float(value) for value in np.where(correct, values, np.minimum(values, 0))]
