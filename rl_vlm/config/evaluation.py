"""`evaluation`: held-out evaluation of the policy."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rl_vlm.config.section import Section


class EvaluationDeadline(Section):
    """How long an evaluation may take."""

    timeout_s: float = Field(1800.0, gt=0)


class EvaluationSection(EvaluationDeadline):
    """Held-out evaluation, greedy; with `samples` above 1 also pass@k at the rollout temperature."""

    every: int = Field(50, ge=0, description="Iterations between evaluations; 0: only before and after.")
    num_items: int = Field(512, ge=1)
    samples: int = Field(1, ge=1)
    weights: Literal["policy", "ema"] = Field(
        "policy", description="ema: evaluate the average of the weights (learner.ema_decay); needs max_policy_lag 0."
    )
    split: Literal["train", "test"] = "test"
    variants: dict[str, dict[str, Any]] = Field(
        {"default": {}},
        min_length=1,
        description="Name -> environment arguments to change; with env.mixture a name -> environment -> arguments.",
    )
    category: str = Field(
        "category", description="Key of the environment's info by which `rl-vlm eval` makes a table of its own."
    )
    at_once: int = Field(
        64,
        ge=1,
        description="Items that `rl-vlm eval` asks at once, as many may have to be asked again after a kill; and that an evaluation "
        "in training plays at once, all env runners together, with env.isolation process.",
    )
