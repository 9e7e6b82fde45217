"""SAC's networks and its policy, a squashed Gaussian."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from rl_vlm.config import SACSection
from rl_vlm.models.kernels import FastLinear


def sample_actions(head: Tensor, noise: Tensor, log_std_bounds: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Actions [B, A] in (-1, 1) and log-probabilities [B] of the squashed Gaussian (arXiv 1801.01290, appendix C).

    `head` [B, 2 A] holds the mean and the raw log standard deviation, `noise` [B, A] is standard normal.
    As in the original, log std = low + (high - low) / 2 × (tanh(raw) + 1). log(1 - tanh²) is in its stable form.
    """
    low, high = log_std_bounds
    mean, raw = head.chunk(2, dim=1)
    log_std = low + 0.5 * (high - low) * (raw.tanh() + 1)
    before = mean + noise * log_std.exp()
    log_normal = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    log_slope = 2 * (math.log(2) - before - functional.softplus(-2 * before))
    return before.tanh(), (log_normal - log_slope).sum(1)


class MLP(nn.ModuleList):
    """Linear layers of these sizes with ReLU between them."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__(FastLinear(*pair) for pair in itertools.pairwise(sizes))

    def forward(self, inputs: Tensor) -> Tensor:
        *hidden, last = self
        for layer in hidden:
            inputs = layer(inputs).relu_()
        return last(inputs)  # type: ignore[no-any-return]


@torch.no_grad()
def _initialize(networks: nn.Module, generator: torch.Generator) -> None:
    """Make every matrix orthogonal and every bias zero."""
    for parameter in networks.parameters():
        parameter.zero_()
        if parameter.ndim == 2:
            parameter.copy_(nn.init.orthogonal_(torch.empty(parameter.shape), generator=generator))


class SACNetworks(nn.Module):
    """The policy `actor`, two `critics`, their `targets`, and `log_alpha` [1]."""

    def __init__(self, observation_size: int, action_size: int, settings: SACSection, seed: int) -> None:
        super().__init__()
        self.action_size, self.log_std_bounds = action_size, settings.log_std_bounds
        hidden = [settings.hidden] * settings.depth
        critic_sizes = (observation_size + action_size, *hidden, 1)
        self.actor = MLP((observation_size, *hidden, 2 * action_size))
        self.critics = nn.ModuleList(MLP(critic_sizes) for _ in range(2))
        self.targets = nn.ModuleList(MLP(critic_sizes) for _ in range(2)).requires_grad_(False)
        self.log_alpha = nn.Parameter(torch.tensor([math.log(settings.init_alpha)]))
        generator = torch.Generator().manual_seed(seed)
        _initialize(self.actor, generator)
        self.reset_critics(generator)

    def reset_critics(self, generator: torch.Generator) -> None:
        _initialize(self.critics, generator)
        self.targets.load_state_dict(self.critics.state_dict())

    def act(self, observations: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """As `sample_actions`, for observations [B, O]; zero noise gives the mode."""
        return sample_actions(self.actor(observations), noise, self.log_std_bounds)

    @staticmethod
    def q_values(critics: nn.ModuleList, observations: Tensor, actions: Tensor) -> list[Tensor]:
        """The values [B] by each of `critics` or `targets`."""
        inputs = torch.cat([observations, actions], dim=1)
        return [critic(inputs)[:, 0] for critic in critics]
