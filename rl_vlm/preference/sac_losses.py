"""The losses of SAC as its papers write them, for autograd."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rl_vlm.config import SACSection
from rl_vlm.preference.mlp import Layer, forward
from rl_vlm.preference.networks import SACNetworks, sample_actions


class Batch(NamedTuple):
    """observations, next_observations [B, O]; actions [B, A]; rewards, continues [B] (0 where the episode terminated)."""

    observations: Tensor
    actions: Tensor
    rewards: Tensor
    next_observations: Tensor
    continues: Tensor


def critic_target(networks: SACNetworks, batch: Batch, noise: Tensor, settings: SACSection) -> Tensor:
    """[B]: r + γ (min Q'(s', a') - α log π(a'|s')) with a' from the policy; nothing after a termination."""
    head, _ = forward(networks.actor_layers(networks.actor.data), batch.next_observations[None])
    sample = sample_actions(head[0], noise, settings.log_std_bounds)
    values = _values(networks.critic_layers(networks.targets), batch.next_observations, sample.actions)
    value = torch.minimum(*values) - networks.log_alpha.data.exp() * sample.log_probs
    return batch.rewards + settings.gamma * batch.continues * value


def critic_loss(networks: SACNetworks, batch: Batch, target: Tensor) -> Tensor:
    """Mean squared error of both critics, added."""
    values = _values(networks.critic_layers(networks.critics), batch.observations, batch.actions)
    return (values - target).square().mean(1).sum()


def actor_loss(networks: SACNetworks, batch: Batch, noise: Tensor, settings: SACSection) -> tuple[Tensor, Tensor]:
    """mean(α log π(a|s) - min Q(s, a)) with a from the policy, and log π(a|s) [B]."""
    head, _ = forward(networks.actor_layers(networks.actor), batch.observations[None])
    sample = sample_actions(head[0], noise, settings.log_std_bounds)
    values = _values(networks.critic_layers(networks.critics.data), batch.observations, sample.actions)
    alpha = networks.log_alpha.data.exp()
    return (alpha * sample.log_probs - torch.minimum(*values)).mean(), sample.log_probs


def alpha_loss(networks: SACNetworks, log_probs: Tensor, target_entropy: float) -> Tensor:
    """mean(α (-log π - target entropy)), the policy held fixed."""
    return (networks.log_alpha.exp() * (-log_probs.detach() - target_entropy)).mean()


def _values(critics: list[Layer], observations: Tensor, actions: Tensor) -> Tensor:
    """[2, B]: of both critics."""
    return forward(critics, critic_inputs(observations, actions))[0][:, :, 0]


def critic_inputs(observations: Tensor, actions: Tensor) -> Tensor:
    """The inputs of both critics, [2, B, O + A]."""
    return torch.cat([observations, actions], dim=1).expand(2, -1, -1)
