"""`sight`: proof that the policy sees its images."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rl_vlm.config.section import Section


class SightSection(Section):
    """Checks that engine and learner see the same images, and figures of how much answers depend on them."""

    gate: Literal["error", "warn", "off"] = Field(
        "error",
        description="What a fault found before training, or while it goes on, does; off: nothing of this section is measured.",
    )
    items: int = Field(8, ge=2, description="Held-out items that the gate asks about, each with several images.")
    every: int = Field(10, ge=0, description="Iterations between the figures sight/kl_blank and sight/gap; 0: none.")
    samples: int = Field(4, ge=1, description="Trajectories that these figures are computed from.")
    blank_items: int = Field(
        32, ge=0, description="Held-out items that evaluations repeat with blank images, for sight/accuracy_gap."
    )
