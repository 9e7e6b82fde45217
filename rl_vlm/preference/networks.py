"""SAC's networks: ReLU MLPs whose weights lie in one vector, and the squashed Gaussian policy. Plain torch.

One vector per network means one optimiser kernel, one target update and one copy. The gradients are written out as matrix
products, without those that autograd computes and SAC does not use (of the critics' weights in the policy's loss, of the
critic that is not the minimum).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rl_vlm.models.products import Product, torch_product

Layer = tuple[Tensor, Tensor]  # weight [out, in], bias [out]

_NARROW = 32  # a layer with fewer inputs is narrow: its weight gradient is computed transposed


def num_weights(sizes: Sequence[int]) -> int:
    """Weights and biases of an MLP with these layer sizes."""
    return sum((before + 1) * after for before, after in itertools.pairwise(sizes))


def layers_of(vector: Tensor, sizes: Sequence[int]) -> list[Layer]:
    """The layers as views of `vector`."""
    layers, start = [], 0
    for before, after in itertools.pairwise(sizes):
        middle = start + before * after
        layers.append((vector[start:middle].view(after, before), vector[middle : middle + after]))
        start = middle + after
    return layers


def forward(layers: Sequence[Layer], inputs: Tensor, product: Product = torch_product) -> tuple[Tensor, list[Tensor]]:
    """Output [B, out] and the input of every layer, which `backward` needs."""
    activations = [inputs]
    for weight, bias in layers[:-1]:
        activations.append(product(activations[-1], weight, bias).relu_())
    weight, bias = layers[-1]
    return product(activations[-1], weight, bias), activations


def backward(
    layers: Sequence[Layer], activations: Sequence[Tensor], gradient: Tensor, product: Product = torch_product
) -> list[Tensor]:
    """Gradients by weight and bias, layer by layer and flattened, of a loss with `gradient` [B, out] at the output."""
    found: list[Tensor] = []
    for place in range(len(layers) - 1, -1, -1):
        found[:0] = [_weight_gradient(gradient, activations[place], product), gradient.sum(0)]
        if place:
            gradient = _through_relu(product(gradient, layers[place][0].t(), None), activations[place])
    return found


def input_gradient(
    layers: Sequence[Layer], activations: Sequence[Tensor], first: int, product: Product = torch_product
) -> Tensor:
    """d output / d inputs[:, first:] for an MLP with one output: [B, in - first]."""
    gradient = _through_relu(layers[-1][0].expand(len(activations[0]), -1), activations[-1])
    for place in range(len(layers) - 2, 0, -1):
        gradient = _through_relu(product(gradient, layers[place][0].t(), None), activations[place])
    return gradient @ layers[0][0][:, first:]


def _weight_gradient(gradient: Tensor, inputs: Tensor, product: Product) -> Tensor:
    """gradientᵀ [out, B] · inputs [B, in], flattened."""
    if inputs.shape[1] < _NARROW:
        # The same numbers as the transpose of inputsᵀ · gradient, which torch multiplies in a fifth of the time.
        return (inputs.t() @ gradient).t().reshape(-1)
    return product(gradient.t(), inputs.t(), None).view(-1)


def _through_relu(gradient: Tensor, output: Tensor) -> Tensor:
    return torch.ops.aten.threshold_backward(gradient, output, 0)  # type: ignore[no-any-return]


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

    `actor` and `critics` are vectors, views of them are layers. `state` and `load` name every matrix, as
    `actor.0.weight`, `critics.1.2.bias`.
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
        self._initialize(layers_of(self.actor.data, self.actor_sizes), generator)
        self.reset_critics(generator)

    def reset_critics(self, generator: torch.Generator) -> None:
        """Initialise both critics again; the targets equal them."""
        for layers in self.critic_layers(self.critics.data):
            self._initialize(layers, generator)
        self.targets.copy_(self.critics.data)

    def critic_layers(self, vector: Tensor) -> tuple[list[Layer], list[Layer]]:
        """Layers of both critics in `critics`, `targets` or another vector of their kind."""
        size = num_weights(self.critic_sizes)
        return layers_of(vector[:size], self.critic_sizes), layers_of(vector[size:], self.critic_sizes)

    @staticmethod
    def _initialize(layers: list[Layer], generator: torch.Generator) -> None:
        for weight, bias in layers:
            fresh = torch.empty(weight.shape)
            nn.init.orthogonal_(fresh, generator=generator)
            weight.copy_(fresh)
            bias.zero_()

    def named_layers(self) -> dict[str, Tensor]:
        """Every matrix and bias by name, as views."""
        nets = {"actor": layers_of(self.actor.data, self.actor_sizes)}
        for kind, vector in (("critics", self.critics.data), ("targets", self.targets)):
            nets |= {f"{kind}.{k}": layers for k, layers in enumerate(self.critic_layers(vector))}
        return {
            f"{net}.{place}.{part}": tensor
            for net, layers in nets.items()
            for place, layer in enumerate(layers)
            for part, tensor in zip(("weight", "bias"), layer, strict=True)
        }

    def state(self) -> dict[str, Tensor]:
        """Copies of everything, by name, on the CPU."""
        named = {**self.named_layers(), "log_alpha": self.log_alpha.data}
        return {name: tensor.detach().cpu().clone() for name, tensor in named.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy the tensors of `state` in. Raises KeyError or RuntimeError if they do not fit."""
        for name, tensor in {**self.named_layers(), "log_alpha": self.log_alpha.data}.items():
            tensor.copy_(state[name])
