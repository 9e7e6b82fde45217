"""The optimiser of the LoRA weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_vlm.config import RunConfig, SFTConfig

if TYPE_CHECKING:
    from rl_vlm.learning.policy_model import PolicyModel  # with peft and all of transformers, for env runners too


def make_optimizer(policy: PolicyModel, run: RunConfig | SFTConfig) -> torch.optim.Optimizer:
    """AdamW on the LoRA weights (Adam when weight_decay is 0)."""
    learner = run.learner
    return torch.optim.AdamW(
        policy.parameters, lr=learner.lr, betas=learner.betas, weight_decay=learner.weight_decay, fused=True
    )
