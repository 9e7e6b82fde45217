"""`algorithm`: which algorithm, and how it learns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rl_vlm.config.section import Section

# The losses that need no plugin. Importing their module would import torch.
BUILTIN_LOSSES = ("clipped", "gspo")
# What a preset sets. A key that is given beside the preset wins over it.
PRESETS: dict[str, dict[str, Any]] = {
    # DeepSeekMath, arXiv 2402.03300.
    "grpo": {
        "loss": "clipped", "aggregation": "sequence_mean", "estimator": "group", "advantage_normalization": "std",
        "clip_low": 0.2, "clip_high": 0.2,
    },
    # DAPO, arXiv 2503.14476: clip-higher, mean over all tokens, dynamic sampling.
    "dapo": {
        "loss": "clipped", "aggregation": "token_mean", "estimator": "group", "advantage_normalization": "std",
        "clip_low": 0.2, "clip_high": 0.28, "max_refill": 2.0,
    },
    # Dr. GRPO, arXiv 2503.20783: no division by the standard deviation or by the length.
    "dr_grpo": {
        "loss": "clipped", "aggregation": "constant", "estimator": "group", "advantage_normalization": "none",
        "clip_low": 0.2, "clip_high": 0.2,
    },
}  # fmt: skip


class AlgorithmSection(Section):
    """`preference_sac` is set by `preference`; all else here is GRPO's. Defaults are the published multi-turn geo3k recipe: clip 0.2 / 0.28, no KL, no entropy bonus, std-normalised."""

    name: str = Field("grpo", description="grpo or preference_sac.")
    iterations: int = Field(100, ge=1)
    preset: str | None = Field(
        None, description="grpo, dapo or dr_grpo: sets loss, aggregation, estimator and their constants together."
    )
    loss: str = Field("clipped", description="Per token: clipped, gspo, or one that a plugin registers.")
    aggregation: Literal["sequence_mean", "token_mean", "constant"] = Field(
        "sequence_mean",
        description="Of token losses: mean of each sequence's mean, mean over all tokens, sum over a constant.",
    )
    estimator: str = Field("group", description="Of advantages: group, rloo, or one that a plugin registers.")
    advantage_normalization: Literal["std", "none"] = Field("std", description="Of the estimator group.")
    advantage_scale: float = Field(1.0, gt=0)
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.28, gt=0)
    tis_cap: float | None = Field(2.0, gt=0, description="Cap of the engine-to-learner importance weight; null: off.")
    kl_coef: float = Field(0.0, ge=0)
    kl_estimator: Literal["k2", "k3"] = "k3"
    entropy_coef: float = Field(0.0, ge=0)
    epochs: int = Field(1, ge=1)
    minibatches: int = Field(1, ge=1, description="Optimiser steps per epoch of a rollout.")
    max_refill: float = Field(
        0.0,
        ge=0,
        description="Groups whose rewards are all equal have no gradient: up to this times prompts_per_iteration of them are "
        "replaced by further groups in each iteration (dynamic sampling). 0: off.",
    )
    shuffle_rewards: bool = Field(False, description="A control that must fail: rewards are permuted over the batch.")

    @property
    def learns_without_advantage(self) -> bool:
        """Whether a KL penalty or an entropy bonus gives samples with zero advantage a gradient."""
        return bool(self.kl_coef or self.entropy_coef)

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, data: Any) -> Any:
        if not isinstance(data, Mapping) or data.get("preset") is None:
            return data
        if data["preset"] not in PRESETS:
            raise ValueError(f"algorithm.preset {data['preset']!r} is not one of {', '.join(PRESETS)}")
        return {**PRESETS[data["preset"]], **data}

    @field_validator("loss")
    @classmethod
    def _no_preset_as_loss(cls, name: str) -> str:
        if name in PRESETS:
            raise ValueError(f"{name} is a preset, which sets more than the loss: use algorithm.preset={name}")
        return name

    @field_validator("kl_estimator", mode="before")
    @classmethod
    def _no_k1(cls, name: Any) -> Any:
        if name == "k1":
            raise ValueError("k1 as a loss has no expected gradient on-policy: use k3 (or k2)")
        return name


def without_preset_keys(algorithm: Mapping[str, Any], preset: str) -> dict[str, Any]:
    """The section's data less the keys that `preset` sets: a preset that comes later replaces what came before."""
    return {key: value for key, value in algorithm.items() if key not in PRESETS.get(preset, {})}
