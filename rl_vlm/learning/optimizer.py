"""The optimiser of the trained weights and of a critic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from rl_vlm.config import RunConfig, SFTConfig

if TYPE_CHECKING:
    from rl_vlm.learning.policy_model import PolicyModel  # with peft and all of transformers, for env runners too

POLICY_GROUP, CRITIC_GROUP = 0, 1  # of the optimiser's parameter groups


def make_optimizer(policy: PolicyModel, run: RunConfig | SFTConfig) -> torch.optim.Optimizer:
    """AdamW (Adam when weight_decay is 0) or Adafactor on the trained weights, and in a second group on the critic.

    Each group keeps its own `base_lr`, which a schedule scales.
    """
    learner = run.learner
    groups: list[dict[str, Any]] = [{"params": policy.parameters, "lr": learner.lr}]
    if policy.critic is not None and isinstance(run, RunConfig) and run.critic is not None:
        groups.append({"params": policy.critic.parameters, "lr": run.critic.lr or learner.lr})
    for group in groups:
        group["base_lr"] = group["lr"]
    optimizer: torch.optim.Optimizer
    if learner.optimizer == "adafactor":
        optimizer = torch.optim.Adafactor(groups, lr=learner.lr, weight_decay=learner.weight_decay)
    else:
        optimizer = torch.optim.AdamW(
            groups, lr=learner.lr, betas=learner.betas, weight_decay=learner.weight_decay, fused=True
        )
    optimizer.register_step_post_hook(lambda *_: policy.trained.stepped())
    return optimizer


def scale_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set every group's learning rate to that share of its base."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor
