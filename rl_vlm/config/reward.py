"""`env.reward`: the reward as a weighted sum of named parts."""

from __future__ import annotations

from pydantic import Field

from rl_vlm.config.section import Section


class RewardSection(Section):
    """The reward as a weighted sum of named parts: the environment's own, built-in ones, and those that plugins register."""

    weights: dict[str, float] = Field(
        default_factory=dict,
        description="Part -> weight; `env` is the environment's own reward. Empty: the environment's own reward as it is.",
    )
    length_budget: int = Field(
        0, ge=0, description="Sampled tokens of an episode that the part `length` does not count."
    )
