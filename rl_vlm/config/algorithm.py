"""`algorithm`: which algorithm, and how it learns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from rl_vlm.config.section import Section

# The losses that need no plugin. Importing their module would import torch.
BUILTIN_LOSSES = ("clipped", "gspo")
# Estimators that compare trajectories with each other, so that a critic would learn nothing from them.
WITHOUT_CRITIC = ("group", "rloo")
# What a preset sets. A key that is given beside the preset wins over it.
PRESETS: dict[str, dict[str, Any]] = {
    # DeepSeekMath, arXiv 2402.03300.
    "grpo": {
        "loss": "clipped", "aggregation": "sequence_mean", "estimator": "group", "advantage_normalization": "std",
        "clip_low": 0.2, "clip_high": 0.2,
    },
    # DAPO, arXiv 2503.14476: clip-higher, mean over all tokens.
    "dapo": {
        "loss": "clipped", "aggregation": "token_mean", "estimator": "group", "advantage_normalization": "std",
        "clip_low": 0.2, "clip_high": 0.28,
    },
    # Dr. GRPO, arXiv 2503.20783: no division by the standard deviation or by the length.
    "dr_grpo": {
        "loss": "clipped", "aggregation": "constant", "estimator": "group", "advantage_normalization": "none",
        "clip_low": 0.2, "clip_high": 0.2,
    },
    # PPO, arXiv 1707.06347, with a critic and GAE (arXiv 1506.02438).
    "ppo": {
        "name": "ppo", "loss": "clipped", "aggregation": "token_mean", "estimator": "gae",
        "advantage_normalization": "std", "clip_low": 0.2, "clip_high": 0.2,
    },
}  # fmt: skip


class AlgorithmSection(Section):
    """`preference_sac` is set by `preference`; all else here is of GRPO and PPO. Defaults are the published multi-turn geo3k recipe: clip 0.2 / 0.28, no KL, no entropy bonus, std-normalised."""

    name: str = Field("grpo", description="grpo, ppo or preference_sac.")
    iterations: int = Field(100, ge=1)
    preset: str | None = Field(
        None, description="grpo, dapo, dr_grpo or ppo: sets loss, aggregation, estimator and their constants together."
    )
    loss: str = Field("clipped", description="Per token: clipped, gspo, or one that a plugin registers.")
    aggregation: Literal["sequence_mean", "token_mean", "constant"] = Field(
        "sequence_mean",
        description="Of token losses: mean of each sequence's mean, mean over all tokens, sum over a constant.",
    )
    estimator: str = Field(
        "group", description="Of advantages: group, rloo, gae (PPO), or one that a plugin registers."
    )
    advantage_normalization: Literal["std", "none"] = Field(
        "std", description="Of the estimators group (over the group) and gae (over all tokens of the batch)."
    )
    advantage_scale: float = Field(1.0, gt=0)
    clip_low: float = Field(0.2, gt=0, lt=1)
    clip_high: float = Field(0.28, gt=0)
    tis_cap: float | None = Field(2.0, gt=0, description="Cap of the engine-to-learner importance weight; null: off.")
    kl_coef: float = Field(0.0, ge=0)
    kl_estimator: Literal["k2", "k3"] = Field("k3", description="Of the KL penalty in the loss.")
    kl_in: Literal["loss", "reward"] = Field(
        "loss", description="Where the KL penalty goes: reward subtracts kl_coef (old - reference) from each token's."
    )
    kl_target: float | None = Field(
        None, gt=0, description="KL per token that kl_coef is adapted to (.02 is usual); needs kl_in: reward."
    )
    kl_rate: float = Field(1.5, gt=1, description="Factor of kl_coef above twice the target, divisor below half of it.")
    kl_min: float = Field(1e-5, gt=0, description="Lower bound of an adapted kl_coef.")
    kl_max: float = Field(0.5, gt=0, description="Upper bound of an adapted kl_coef.")
    gae_level: Literal["token", "turn", "bilevel"] = Field(
        "token", description="What one step of GAE is: a token, a turn (one value per turn), or tokens inside turns."
    )
    gamma: float = Field(1.0, ge=0, le=1, description="Discount per token.")
    gae_lambda: float = Field(1.0, ge=0, le=1, description="GAE's lambda per token.")
    turn_gamma: float = Field(1.0, ge=0, le=1, description="Discount per turn (gae_level turn and bilevel).")
    turn_lambda: float = Field(1.0, ge=0, le=1, description="GAE's lambda per turn (gae_level turn and bilevel).")
    entropy_coef: float = Field(0.0, ge=0)
    epochs: int = Field(1, ge=1)
    minibatches: int = Field(1, ge=1, description="Optimiser steps per epoch of a rollout.")
    shuffle_rewards: bool = Field(False, description="A control that must fail: rewards are permuted over the batch.")

    @property
    def learns_without_advantage(self) -> bool:
        """Whether a KL penalty or an entropy bonus gives samples with zero advantage a gradient."""
        return bool(self.kl_loss_coef or self.entropy_coef)

    @property
    def kl_loss_coef(self) -> float:
        """Weight of the KL penalty in the loss."""
        return self.kl_coef if self.kl_in == "loss" else 0.0

    @property
    def kl_in_reward(self) -> bool:
        """Whether tokens pay for their distance from the base model."""
        return self.kl_in == "reward" and bool(self.kl_coef or self.kl_target)

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        # PPO alone has no use for the defaults, which are GRPO's.
        preset = data.get("preset") or ("ppo" if data.get("name") == "ppo" else None)
        if preset is None:
            return data
        if preset not in PRESETS:
            raise ValueError(f"algorithm.preset {preset!r} is not one of {', '.join(PRESETS)}")
        return {**PRESETS[preset], **data}

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
