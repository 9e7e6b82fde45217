"""The optimiser of a policy (and of its critic), its learning rate over a run, and averaged weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_vlm.config import OptimizerSection, PolicyConfig, SFTConfig
from rl_vlm.learning.policy_model import PolicyModel


def make_optimizer(policy: PolicyModel, run: PolicyConfig | SFTConfig) -> torch.optim.Optimizer:
    """AdamW or Adafactor on what is trained and, in a second group, on the critic. `scale_lr` scales `base_lr`."""
    learner = run.learner
    groups: list[dict[str, Any]] = [{"params": policy.parameters, "lr": learner.lr}]
    if policy.critic is not None and isinstance(run, PolicyConfig) and run.critic is not None:
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


def lr_factor(learner: OptimizerSection, number: int, last: int) -> float:
    """The share of `learner.lr` in iteration (or step) 0, 1, ... `last`."""
    if learner.lr_schedule == "constant":
        return 1.0
    return float(np.interp(number, [0, max(last, 1)], [1.0, learner.lr_final_fraction]))


def scale_lr(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set the learning rate of every group to this share of its `base_lr`."""
    for group in optimizer.param_groups:
        group["lr"] = group["base_lr"] * factor


@torch.no_grad()
def move_average(average: Mapping[str, Tensor], weights: Mapping[str, Tensor], decay: float) -> None:
    """average = decay · average + (1 - decay) · weights; A and B of LoRA each on their own, not their product."""
    for name, tensor in average.items():
        tensor.lerp_(weights[name].detach(), 1 - decay)
