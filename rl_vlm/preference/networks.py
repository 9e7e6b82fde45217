"""SAC's networks, each a vector of weights (see mlp.py), and the squashed Gaussian policy. Plain torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rl_vlm.preference.mlp import Layer, layers_of, num_weights


class PolicySample(NamedTuple):
    """Actions drawn with given noise; the last three fields are inputs of `policy_gradient`."""

    actions: Tensor  # [B, A] in (-1, 1)
    log_probs: Tensor  # [B]
    noise: Tensor
    std: Tensor
    tanh_raw: Tensor


def sample_actions(head: Tensor, noise: Tensor, log_std_bounds: tuple[float, float]) -> PolicySample:
    """The squashed Gaussian of SAC (arXiv 1801.01290, appendix C) with `head` = (mean, raw log std) [B, 2 A].

    log std = low + (high - low) / 2 × (tanh(raw) + 1), as in the original; log(1 - tanh²) in its stable form.
    """
    low, high = log_std_bounds
    mean, raw = head.chunk(2, dim=1)
    tanh_raw = raw.tanh()
    log_std = low + 0.5 * (high - low) * (tanh_raw + 1)
    std = log_std.exp()
    before = mean + noise * std
    log_normal = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi)
    log_slope = 2 * (math.log(2) - before - nn.functional.softplus(-2 * before))
    return PolicySample(before.tanh(), (log_normal - log_slope).sum(1), noise, std, tanh_raw)


def policy_gradient(sample: PolicySample, slopes: Tensor, alpha: Tensor, log_std_bounds: tuple[float, float]) -> Tensor:
    """d/d head [B, 2 A] of mean(alpha × log_prob - Q(action)), with `slopes` = dQ/d action [B, A].

    For one sample, d log_prob / d before = 2 tanh(before) and d log_prob / d log_std = -1 besides its way through
    `before` = mean + noise × std.
    """
    low, high = log_std_bounds
    actions = sample.actions
    before = (2 * alpha * actions - slopes * (1 - actions.square())) / len(actions)
    log_std = before * sample.noise * sample.std - alpha / len(actions)
    return torch.cat([before, log_std * (0.5 * (high - low)) * (1 - sample.tanh_raw.square())], dim=1)


class SACNetworks(nn.Module):
    """Policy, two critics, their targets and log alpha.

    `actor`, `critics` and `targets` are vectors, the last two of two MLPs after one another; `actor_layers` and `critic_layers`
    are views of them. `state` and `load` name every matrix, as `actor.0.weight`, `critics.1.2.bias`.
    """

    def __init__(
        self, observation_size: int, action_size: int, hidden: int, depth: int, init_alpha: float, seed: int
    ) -> None:
        super().__init__()
        self.actor_sizes = (observation_size, *[hidden] * depth, 2 * action_size)
        self.critic_sizes = (observation_size + action_size, *[hidden] * depth, 1)
        self.observation_size, self.action_size = observation_size, action_size
        self.actor = nn.Parameter(torch.empty(num_weights(self.actor_sizes)))
        self.critics = nn.Parameter(torch.empty(2 * num_weights(self.critic_sizes)))
        self.targets: Tensor
        self.register_buffer("targets", torch.empty(2 * num_weights(self.critic_sizes)))
        self.log_alpha = nn.Parameter(torch.tensor([math.log(init_alpha)]))
        generator = torch.Generator().manual_seed(seed)
        self._initialize(self.actor_layers(self.actor.data), generator)
        self.reset_critics(generator)

    def reset_critics(self, generator: torch.Generator) -> None:
        """Initialise both critics again; the targets equal them."""
        self._initialize(self.critic_layers(self.critics.data), generator)
        self.targets.copy_(self.critics.data)

    def actor_layers(self, vector: Tensor) -> list[Layer]:
        """Layers of the policy in `actor`, its gradient or another vector of its kind."""
        return layers_of(vector, self.actor_sizes)

    def critic_layers(self, vector: Tensor) -> list[Layer]:
        """Layers of both critics in `critics`, `targets` or another vector of their kind."""
        return layers_of(vector, self.critic_sizes, 2)

    @staticmethod
    def _initialize(layers: list[Layer], generator: torch.Generator) -> None:
        # Network by network: a seed must go on to give the weights that it has given.
        for k in range(len(layers[0][0])):
            for weight, bias in layers:
                fresh = torch.empty(weight.shape[1:])
                nn.init.orthogonal_(fresh, generator=generator)
                weight[k].copy_(fresh)
                bias[k].zero_()

    def named_layers(self) -> dict[str, Tensor]:
        """Every matrix and bias by name, as views."""
        found: dict[str, Tensor] = {}
        for kind, layers in (
            ("actor", self.actor_layers(self.actor.data)),
            ("critics", self.critic_layers(self.critics.data)),
            ("targets", self.critic_layers(self.targets)),
        ):
            for k in range(len(layers[0][0])):
                net = kind if kind == "actor" else f"{kind}.{k}"
                for place, (weight, bias) in enumerate(layers):
                    found |= {f"{net}.{place}.weight": weight[k], f"{net}.{place}.bias": bias[k, 0]}
        return found

    def state(self) -> dict[str, Tensor]:
        """Copies of everything, by name, on the CPU."""
        named = {**self.named_layers(), "log_alpha": self.log_alpha.data}
        return {name: tensor.detach().cpu().clone() for name, tensor in named.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy the tensors of `state` in. Raises KeyError or RuntimeError if they do not fit."""
        for name, tensor in {**self.named_layers(), "log_alpha": self.log_alpha.data}.items():
            tensor.copy_(state[name])
