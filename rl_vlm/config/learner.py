"""`learner`, `algorithm` and `critic`: the learner group, its optimiser, and what it learns by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from rl_vlm.config.section import Beta, Count, Natural, NonNegative, OnlyWith, Positive, Section, Share


class ComputeSection(Section):
    place: ClassVar[str] = "learner."

    num_threads: Count = 1  # torch threads of a learner on a CPU.


class LearnerActors(ComputeSection):
    num_learners: Natural = 0  # 0: inside the driver; more: actors that share each optimiser step.
    cpus_per_learner: NonNegative = 0.5  # CPUs that Ray reserves for a learner.
    gpus_per_learner: Share = 0.0  # A learner computes on one GPU, or on a share of it.
    max_restarts: Natural = 3  # How often a dead learner is replaced from the last checkpoint.
    # After which a learner counts as dead. Later updates get ten times the longest so far, between 120 s and this.
    update_timeout_s: Positive = 1800.0

    @property
    def in_step(self) -> bool:
        """Whether learners make every pass, and read and restore state, together."""
        return False


class OptimizerSection(ComputeSection):
    conditional: ClassVar[tuple[OnlyWith, ...]] = (
        OnlyWith(("lr_final_fraction",), "lr_schedule", ("linear",)),
        OnlyWith(("betas",), "optimizer", ("adamw",)),
    )

    lr: Positive = 1e-5  # The learning rate at the start.
    # linear: falls to `lr_final_fraction` of `lr` at the last iteration.
    lr_schedule: Literal["constant", "linear"] = "constant"
    lr_final_fraction: Share = 0.1  # Of a linear schedule, reached at the last iteration.
    # adafactor keeps row and column sums instead of moments, and has no betas.
    optimizer: Literal["adamw", "adafactor"] = "adamw"
    betas: tuple[Beta, Beta] = (0.9, 0.98)  # Of AdamW.
    weight_decay: NonNegative = 0.0  # Of the optimiser.
    max_grad_norm: Positive = 1.0  # Gradients with a larger norm are scaled down to it.
    micro_batch_tokens: Count = 8192  # Padded tokens of a forward pass; gradients of several add up to a step.
    share_prompts: bool = True  # Samples of a group compute their common prompt once.
    # Of packed rows. dense: one mask over whole rows; segments: each continuation by itself; auto: what is cheaper.
    attention: Literal["auto", "segments", "dense"] = "auto"
    # Decoder layers, the first ones, that the backward pass computes again: less memory, more time. auto: as few as
    # the plan fits on a GPU, and none without one.
    checkpoint: Literal["auto", "none", "all"] | int = "auto"

    @field_validator("checkpoint", mode="before")
    @classmethod
    def _is_known_or_a_number(cls, value: Any) -> Any:
        if value not in ("auto", "none", "all") and not (type(value) is int and value >= 0):
            raise ValueError(f"learner.checkpoint is {value!r}: give auto, none, all or a number of layers")
        return value

    @property
    def may_recompute(self) -> bool:
        """Whether layers may be computed again; those of a vision tower that is trained whole then are."""
        return self.checkpoint not in ("auto", "none", 0)


class LearnerSection(LearnerActors, OptimizerSection):
    conditional: ClassVar[tuple[OnlyWith, ...]] = (
        *OptimizerSection.conditional,
        OnlyWith(("offload_optimizer",), "strategy", ("zero1", "zero2", "zero3")),
        OnlyWith(("offload_params",), "strategy", ("fsdp2", "zero3")),
    )

    # single: one learner; all_reduce: gradients are added; fsdp2: the layers are sharded; zero1, zero2, zero3:
    # DeepSpeed shards optimiser, gradients, frozen layers. null: single or all_reduce, by num_learners.
    strategy: Literal["single", "all_reduce", "fsdp2", "zero1", "zero2", "zero3"] | None = None
    offload_optimizer: bool = False  # Keep the optimiser's state in host memory and step there; zero1, zero2 and zero3.
    offload_params: bool = False  # Keep the shards of the layers in host memory; fsdp2 and zero3.
    # Per optimiser step, of an average of the weights that is kept beside them; evaluation.weights uses it.
    ema_decay: float | None = Field(None, gt=0, lt=1)
    # Measure policy/entropy, about 6 % of the time of a large head on a CPU. A bonus measures it anyway.
    log_entropy: bool = True

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        name = self.strategy
        if name == "single" and self.num_learners > 1:
            yield f"learner.strategy single is for one learner, and num_learners is {self.num_learners}: use all_reduce"
        if name not in (None, "single") and self.num_learners == 0:
            yield f"learner.strategy {name} needs learners that are actors: set num_learners to 2 or more"
        if self.zero_stage and self.optimizer == "adafactor":
            yield f"learner.strategy {name} has flat shards, without adafactor's rows: use adamw, or strategy fsdp2"

    @property
    def zero_stage(self) -> int:
        """What DeepSpeed shards: 1 the optimiser's state, 2 gradients too, 3 frozen layers too; 0: nothing."""
        return int(self.strategy[-1]) if self.strategy in ("zero1", "zero2", "zero3") else 0

    @property
    def shards_layers(self) -> bool:
        """Whether each learner holds a part of the decoder's layers, so that forward passes wait for each other."""
        return self.strategy in ("fsdp2", "zero3")

    @property
    def may_recompute(self) -> bool:
        return super().may_recompute or (self.checkpoint == "auto" and self.gpus_per_learner > 0)

    @property
    def in_step(self) -> bool:
        return self.strategy == "fsdp2" or bool(self.zero_stage)


class CriticSection(Section):
    """The value function of PPO: a linear head on the last hidden state of the policy, or of an adapter of its own."""

    # head: on the policy's hidden state. adapter: a second LoRA on the same frozen model, with a head.
    kind: Literal["head", "adapter"] = "head"
    hidden: Natural = 0  # Width of a hidden layer of the head; 0: a linear head.
    lr: Positive | None = None  # null: learner.lr.
    loss_coef: Positive = 0.5  # Weight of the value loss.
    clip: Positive | None = 0.2  # How far a value may move from the old one, in normalised returns; null: not clipped.
    warmup_iterations: Natural = 0  # First iterations, in which the critic learns alone.


# The losses that need no plugin. Importing their module would import torch.
BUILTIN_LOSSES = ("clipped", "gspo", "cispo", "sapo")
BUILTIN_ESTIMATORS = ("group", "rloo", "reinforce_pp", "reinforce_pp_baseline", "gigpo", "gae")
# Estimators that compare trajectories with each other, so that a critic would learn nothing from them.
WITHOUT_CRITIC = tuple(name for name in BUILTIN_ESTIMATORS if name != "gae")
_GRPO: dict[str, Any] = {
    "loss": "clipped", "aggregation": "sequence_mean", "estimator": "group", "advantage_normalization": "std",
    "advantage_scale": 1.0,
}  # fmt: skip
_CLIP = {"clip_low": 0.2, "clip_high": 0.2}
# What a preset sets. A key that is given beside the preset wins over it.
PRESETS: dict[str, dict[str, Any]] = {
    # DeepSeekMath, arXiv 2402.03300; without its KL penalty of 0.04, which is kl_coef's.
    "grpo": _GRPO | _CLIP,
    # DAPO, arXiv 2503.14476; its penalty for long answers is overlong_buffer's (there a fifth of the budget).
    "dapo": _GRPO | {"aggregation": "token_mean", "clip_low": 0.2, "clip_high": 0.28, "max_refill": 2.0},
    # GSPO, arXiv 2507.18071, section 5.1: a trajectory's ratio moves far less than a token's.
    "gspo": _GRPO | {"loss": "gspo", "clip_low": 3e-4, "clip_high": 4e-4},
    # CISPO, MiniMax-M1, arXiv 2506.13585, which does not publish its bound; 5 is that of ScaleRL, arXiv 2510.13786.
    "cispo": _GRPO | {"loss": "cispo", "aggregation": "token_mean", "cispo_cap": 5.0},
    # SAPO, arXiv 2511.20347.
    "sapo": _GRPO | {"loss": "sapo", "sapo_tau_pos": 1.0, "sapo_tau_neg": 1.05},
    # RLOO, arXiv 2402.14740: REINFORCE on whole trajectories. With one minibatch nothing is clipped.
    "rloo": _GRPO | _CLIP | {"aggregation": "constant", "estimator": "rloo", "advantage_normalization": "none"},
    # REINFORCE++, arXiv 2501.03262: no baseline of the group, advantages normalised over the whole batch.
    "reinforce_pp": _GRPO | _CLIP | {"estimator": "reinforce_pp"},
    # Dr. GRPO, arXiv 2503.20783: no division by the standard deviation or by the length.
    "dr_grpo": _GRPO | _CLIP | {"aggregation": "constant", "advantage_normalization": "none"},
    # PPO, arXiv 1707.06347, with a critic and GAE (arXiv 1506.02438).
    "ppo": _GRPO | _CLIP | {"name": "ppo", "aggregation": "token_mean", "estimator": "gae"},
}
# exp(old - behaviour) within which a token (IcePop, arXiv 2510.18855) or the geometric mean of a trajectory is kept.
_MISMATCH_BOUNDS = {"mask": (0.5, 5.0), "sequence_mask": (0.99, 1.01)}


class AlgorithmSection(Section):
    """GRPO, PPO and distillation. Defaults are the published multi-turn geo3k recipe."""

    place: ClassVar[str] = "algorithm."
    conditional: ClassVar[tuple[OnlyWith, ...]] = (
        OnlyWith(("dual_clip",), "loss", ("clipped", "gspo")),
        OnlyWith(("cispo_cap",), "loss", ("cispo",)),
        OnlyWith(("sapo_tau_pos", "sapo_tau_neg"), "loss", ("sapo",)),
        OnlyWith(("gigpo_gamma", "gigpo_step_weight"), "estimator", ("gigpo",)),
        OnlyWith(("gae_level", "gamma", "gae_lambda", "turn_gamma", "turn_lambda"), "estimator", ("gae",)),
        OnlyWith(("gamma", "gae_lambda"), "gae_level", ("token", "bilevel")),
        OnlyWith(("turn_gamma", "turn_lambda"), "gae_level", ("turn", "bilevel")),
        OnlyWith(("tis_cap",), "mismatch", ("truncate", "sequence_mask")),
        OnlyWith(("mismatch_low", "mismatch_high"), "mismatch", ("mask", "sequence_mask")),
        OnlyWith(("kl_estimator",), "kl_in", ("loss",)),
    )

    # grpo, ppo, or distill, which learns from `teacher`; preference_sac is set by `preference`.
    name: Literal["grpo", "ppo", "distill"] = "grpo"
    iterations: Count = 100  # Rounds of sampling and learning.
    # Sets loss, aggregation, estimator and their published constants together; see PRESETS.
    preset: str | None = None
    loss: str = "clipped"  # Per token: clipped, gspo, cispo, sapo, or one that a plugin registers.
    # Of token losses: mean of each sequence's mean, mean over all tokens, sum over a constant.
    aggregation: Literal["sequence_mean", "token_mean", "constant"] = "sequence_mean"
    # Of advantages: group, rloo, reinforce_pp, reinforce_pp_baseline, gigpo, gae (PPO), or one that a plugin registers.
    estimator: str = "group"
    advantage_normalization: Literal["std", "none"] = "std"  # Of the estimators group, gigpo and gae.
    advantage_scale: Positive = 1.0  # Advantages are multiplied by this.
    gigpo_gamma: Share = 0.95  # Discount per turn of gigpo's step rewards.
    gigpo_step_weight: NonNegative = 1.0  # Of gigpo's step-relative beside its episode advantage.
    # The last tokens before rollout.max_new_tokens, over which the reward falls linearly by 1 (DAPO); 0: off.
    overlong_buffer: Natural = 0
    clip_low: float = Field(0.2, gt=0, lt=1)  # Of the losses clipped and gspo, as is clip_high.
    clip_high: Positive = 0.28  # Ratios above 1 + this are clipped.
    # Bounds a bad token's loss at this times its advantage (arXiv 1912.09729); null: off.
    dual_clip: float | None = Field(None, gt=1)
    cispo_cap: float = Field(5.0, ge=1)  # Upper bound of the ratio, which cispo uses as a weight.
    sapo_tau_pos: Positive = 1.0  # Temperature of sapo's gate for positive advantages.
    sapo_tau_neg: Positive = 1.05  # Temperature of sapo's gate for negative advantages.
    # Between engine and learner. truncate: token weights at tis_cap; mask: tokens outside [mismatch_low,
    # mismatch_high]; sequence_mask: whole trajectories by their geometric mean, and the rest truncated.
    mismatch: Literal["truncate", "mask", "sequence_mask", "none"] = "truncate"
    tis_cap: Positive | None = 2.0  # Cap of the engine-to-learner importance weight; null: off.
    mismatch_low: float | None = Field(None, gt=0, lt=1)  # null: 0.5 with mask, 0.99 with sequence_mask.
    mismatch_high: float | None = Field(None, gt=1)  # null: 5 with mask, 1.01 with sequence_mask.
    kl_coef: NonNegative = 0.0  # Weight of the KL divergence from the reference model.
    kl_estimator: Literal["k2", "k3"] = "k3"  # Of the KL penalty in the loss.
    # Where the KL penalty goes: reward subtracts kl_coef (old - reference) from each token's.
    kl_in: Literal["loss", "reward"] = "loss"
    kl_target: Positive | None = None  # KL per token that kl_coef is adapted to (0.02 is usual); needs kl_in: reward.
    # What one step of GAE is: a token, a turn (one value per turn), or tokens inside turns.
    gae_level: Literal["token", "turn", "bilevel"] = "token"
    gamma: Share = 1.0  # Discount per token.
    gae_lambda: Share = 1.0  # GAE's lambda per token.
    turn_gamma: Share = 1.0  # Discount per turn (gae_level turn and bilevel).
    turn_lambda: Share = 1.0  # GAE's lambda per turn (gae_level turn and bilevel).
    entropy_coef: NonNegative = 0.0  # Weight of the policy's entropy, which is added to the objective.
    epochs: Count = 1  # Passes over the samples of an iteration.
    minibatches: Count = 1  # Optimiser steps per epoch of a rollout.
    # Groups whose rewards are all equal (before overlong_buffer, as in DAPO) have no gradient: up to this times
    # prompts_per_iteration of them are replaced by further groups in each iteration. 0: off.
    max_refill: NonNegative = 0.0
    shuffle_rewards: bool = False  # A control that must fail: rewards are permuted over the batch.

    @property
    def kl_loss_coef(self) -> float:
        return self.kl_coef if self.kl_in == "loss" else 0.0

    @property
    def has_reference(self) -> bool:
        """Whether learning compares the policy with the model that it began as."""
        return bool(self.kl_loss_coef or self.kl_in_reward)

    @property
    def kl_in_reward(self) -> bool:
        """Whether tokens pay for their distance from the base model."""
        return self.kl_in == "reward" and bool(self.kl_coef or self.kl_target)

    @property
    def mismatch_bounds(self) -> tuple[float, float]:
        """Where a mask of `mismatch` begins, below and above."""
        low, high = _MISMATCH_BOUNDS.get(self.mismatch, (0.0, float("inf")))
        return self.mismatch_low or low, self.mismatch_high or high

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        preset = _preset_of(data.get("preset"), data.get("name"))
        if preset is None:
            return data
        if preset not in PRESETS:
            raise ValueError(f"algorithm.preset {preset!r} is not one of {', '.join(PRESETS)}")
        return {**PRESETS[preset], **data}

    @field_validator("loss")
    @classmethod
    def _no_preset_as_loss(cls, name: str) -> str:
        if name in PRESETS and name not in BUILTIN_LOSSES:
            raise ValueError(f"{name} is a preset, which sets more than the loss: use algorithm.preset={name}")
        return name

    @field_validator("kl_estimator", mode="before")
    @classmethod
    def _no_k1(cls, name: Any) -> Any:
        if name == "k1":
            raise ValueError("k1 as a loss has no expected gradient on-policy: use k3 (or k2)")
        return name

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.kl_target and self.kl_in != "reward":
            yield "algorithm.kl_target adapts a penalty in the reward: set algorithm.kl_in to reward"
        if self.estimator == "gae" and self.name != "ppo":
            yield "algorithm.estimator gae needs a critic: set algorithm.name to ppo"
        if self.estimator in WITHOUT_CRITIC and self.name == "ppo":
            yield f"algorithm.estimator {self.estimator} needs no critic: use gae, or algorithm.name grpo"

    def reads(self, rule: OnlyWith) -> bool:
        """What a plugin's loss or estimator reads is unknown."""
        builtin = {"loss": BUILTIN_LOSSES, "estimator": BUILTIN_ESTIMATORS}.get(rule.chooser)
        return super().reads(rule) or (builtin is not None and getattr(self, rule.chooser) not in builtin)

    def changed(self, *keys: str) -> Iterator[str]:
        """What the preset sets is no change either."""
        preset = PRESETS.get(_preset_of(self.preset, self.name) or "", {})
        for key in super().changed(*keys):
            if getattr(self, key) != preset.get(key):
                yield key


def _preset_of(preset: str | None, name: str | None) -> str | None:
    # PPO alone has no use for the defaults, which are GRPO's.
    return preset or ("ppo" if name == "ppo" else None)


def without_preset_keys(algorithm: Mapping[str, Any], preset: Any, replaced: Any = None) -> dict[str, Any]:
    """The section without the keys that `preset` sets, and without what the `replaced` preset had set."""
    new, old = (PRESETS.get(name, {}) if isinstance(name, str) else {} for name in (preset, replaced))
    return {key: value for key, value in algorithm.items() if key not in new and not (key in old and value == old[key])}
