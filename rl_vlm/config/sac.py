"""`preference.sac`: the agent of the preference loop."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rl_vlm.config.section import Beta, Section


class SACSection(Section):
    """The agent of the preference loop. Defaults are RL-VLM-F's for MetaWorld."""

    lr: float = Field(3e-4, gt=0, description="Of actor and critics.")
    alpha_lr: float = Field(1e-4, gt=0)
    init_alpha: float = Field(0.1, gt=0)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    gamma: float = Field(0.99, ge=0, le=1)
    tau: float = Field(0.005, gt=0, le=1)
    target_update_every: int = Field(2, ge=1)
    actor_update_every: int = Field(1, ge=1)
    batch_size: int = Field(512, ge=1)
    hidden: int = Field(256, ge=1)
    depth: int = Field(3, ge=1, description="Hidden layers.")
    log_std_bounds: tuple[float, float] = (-5.0, 2.0)
    target_entropy: float | None = Field(None, description="null: minus the number of actions.")
    updates_per_step: int = Field(1, ge=1)
    compile: Literal["auto", "on", "off"] = Field(
        "auto",
        description="torch.compile, with a fallback. auto: on a GPU, where the run makes enough updates to pay for it.",
    )
