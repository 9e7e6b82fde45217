"""The networks of a reward model: convolutions for pictures, a perceptron for states and actions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rl_vlm.config import RewardModelSection
from rl_vlm.types import UserInputError

_SQUASH: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "relu": nn.ReLU}
_LAST_LAYER = 1e-3  # bound of the last layer's initial weights: rewards begin near 0 and near each other


class ImageCNN(nn.Module):
    """Convolutions with ReLU, then one linear layer: float images [N, 3, H, W] in [0, 1] to [N].

    The layers are RL-VLM-F's. The initial weights are He's (2015, equation 10) and pixels are scaled to [-1, 1],
    because with RL-VLM-F's small uniform weights and pixels from 0 the loss hardly falls in the first hundreds of
    gradient steps (MetaWorld's drawer-open, 300 pairs, 60 steps: rank correlation with the true reward 0.73 to 0.76
    against 0.85 to 0.87).
    """

    def __init__(self, height: int, width: int, settings: RewardModelSection) -> None:
        super().__init__()
        kernels, channels, strides = settings.kernels, settings.channels, settings.strides
        if not len(kernels) == len(channels) == len(strides):
            raise UserInputError(
                f"The reward CNN needs as many kernels ({len(kernels)}) as channels ({len(channels)}) and strides "
                f"({len(strides)})."
            )
        layers, before = list[nn.Module](), 3
        for kernel, after, stride in zip(kernels, channels, strides, strict=True):
            if min(height, width) < kernel:
                raise UserInputError(
                    f"Pictures of this size are too small for the reward CNN: a kernel of {kernel} meets {height} × "
                    f"{width} pixels. Use larger pictures or fewer layers."
                )
            layer = nn.Conv2d(before, after, kernel, stride)
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
            layers += [layer, nn.ReLU()]
            height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
            before = after
        self.features = nn.Sequential(*layers)
        self.last = nn.Linear(before * height * width, 1)
        nn.init.uniform_(self.last.weight, -_LAST_LAYER, _LAST_LAYER)
        nn.init.uniform_(self.last.bias, -_LAST_LAYER, _LAST_LAYER)
        self.squash = _SQUASH[settings.squash]()

    def forward(self, images: Tensor) -> Tensor:
        return self.squash(self.last(self.features(2 * images - 1).flatten(1)))[:, 0]  # type: ignore[no-any-return]


class ImageMembers(nn.Module):
    """E image networks: one batch uint8 [N, H, W, 3] (the channels-last layout) per member, to [E, N]."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(networks).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        both = zip(self.networks, inputs, strict=True)
        return torch.stack([network(frames.permute(0, 3, 1, 2).float() / 255).flatten() for network, frames in both])


class MLPMembers(nn.Module):
    """E multilayer perceptrons with LeakyReLU as stacked weights: one batch float32 [N, D] per member, to [E, N]."""

    def __init__(self, inputs: int, settings: RewardModelSection) -> None:
        super().__init__()
        size = settings.size
        widths = [inputs, *[settings.hidden] * settings.layers, 1]
        self.weights = nn.ParameterList()
        self.biases = nn.ParameterList()
        for before, after in itertools.pairwise(widths):
            # torch.nn.Linear's own initial distribution.
            bound = 1 / math.sqrt(before)
            self.weights.append(nn.Parameter(torch.empty(size, before, after).uniform_(-bound, bound)))
            self.biases.append(nn.Parameter(torch.empty(size, 1, after).uniform_(-bound, bound)))
        self.squash = _SQUASH[settings.squash]()

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        hidden = torch.stack(list(inputs))
        last = len(self.weights) - 1
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            hidden = torch.baddbmm(bias, hidden, weight)
            if number < last:
                hidden = nn.functional.leaky_relu(hidden)
        return self.squash(hidden)[..., 0]  # type: ignore[no-any-return]


def build_members(shape: tuple[int, ...], settings: RewardModelSection) -> nn.Module:
    if settings.architecture == "mlp":
        return MLPMembers(shape[0], settings)
    if settings.architecture == "cnn":
        return ImageMembers([ImageCNN(shape[0], shape[1], settings) for _ in range(settings.size)])
    import torchvision

    # As in the original, its output is not squashed.
    return ImageMembers([torchvision.models.resnet18(num_classes=1) for _ in range(settings.size)])
