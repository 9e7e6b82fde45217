"""`critic`: PPO's value function."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from rl_vlm.config.section import Section


class CriticSection(Section):
    """The value function of PPO: a linear head on the last hidden state of the policy, or of an adapter of its own."""

    kind: Literal["head", "adapter"] = Field(
        "head",
        description="head: on the policy's hidden state. adapter: a second LoRA on the same frozen model, with a head.",
    )
    hidden: int = Field(0, ge=0, description="Width of a hidden layer of the head; 0: a linear head.")
    lr: float | None = Field(None, gt=0, description="null: learner.lr.")
    loss_coef: float = Field(0.5, gt=0, description="Weight of the value loss.")
    clip: float | None = Field(
        0.2, gt=0, description="How far a value may move from the old one, in normalised returns; null: not clipped."
    )
    normalize_returns: bool = Field(True, description="Learn returns minus their mean over their standard deviation.")
    stop_gradient: bool = Field(False, description="Of the head: the value loss does not train the policy's LoRA.")
    warmup_iterations: int = Field(0, ge=0, description="First iterations, in which the critic learns alone.")

    def problems(self) -> Iterator[str]:
        """A gradient that is stopped where there is none."""
        if self.stop_gradient and self.kind == "adapter":
            yield "critic.stop_gradient has no effect with kind adapter, which never trains the policy's LoRA: remove it"
