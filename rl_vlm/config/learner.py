"""`learner`: the learner group and its optimiser."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rl_vlm.config.section import Section


class LearnerSection(Section):
    """The learner group."""

    num_learners: int = Field(0, ge=0, description="0: inside the driver; more: actors that share each optimiser step.")
    cpus_per_learner: float = Field(0.5, ge=0)
    gpus_per_learner: float = Field(0.0, ge=0)
    lr: float = Field(1e-5, gt=0)
    lr_schedule: Literal["constant", "linear"] = "constant"
    lr_final_fraction: float = Field(
        0.1, ge=0, le=1, description="Of a linear schedule, reached at the last iteration."
    )
    optimizer: Literal["adamw", "adafactor"] = Field(
        "adamw", description="adafactor keeps row and column sums instead of moments, and has no betas."
    )
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = Field(0.0, ge=0)
    max_grad_norm: float = Field(1.0, gt=0)
    ema_decay: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Per optimiser step, of an average of the weights that is kept beside them; evaluation.weights uses it.",
    )
    micro_batch_tokens: int = Field(8192, ge=1)
    share_prompts: bool = True
    gradient_checkpointing: bool = False
    num_threads: int = Field(1, ge=1)
    max_restarts: int = Field(3, ge=0, description="How often a dead learner is replaced from the last checkpoint.")
