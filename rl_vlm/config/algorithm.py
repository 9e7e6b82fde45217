"""`algorithm`: which algorithm, and how it learns."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rl_vlm.config.section import Section


class AlgorithmSection(Section):
    """`preference_sac` is set by `preference`; all else here is GRPO's. Defaults are the published multi-turn geo3k recipe: clip 0.2 / 0.28, no KL, no entropy bonus, std-normalised."""

    name: Literal["grpo", "preference_sac"] = "grpo"
    iterations: int = Field(100, ge=1)
    loss: Literal["grpo", "dapo", "dr_grpo"] = "grpo"
    advantage_normalization: Literal["std", "none"] = "std"
    advantage_scale: float = Field(1.0, gt=0)
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.28, gt=0)
    tis_cap: float | None = Field(2.0, gt=0, description="Cap of the engine-to-learner importance weight; null: off.")
    kl_coef: float = Field(0.0, ge=0)
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy_coef: float = Field(0.0, ge=0)
    epochs: int = Field(1, ge=1)
    minibatches: int = Field(1, ge=1, description="Optimiser steps per epoch of a rollout.")
    shuffle_rewards: bool = Field(False, description="A control that must fail: rewards are permuted over the batch.")

    @property
    def learns_without_advantage(self) -> bool:
        """Whether a KL penalty or an entropy bonus gives samples with zero advantage a gradient."""
        return bool(self.kl_coef or self.entropy_coef)
