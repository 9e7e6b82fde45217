"""The networks of a reward ensemble: RL-VLM-F's image CNN, ResNet-18, and an MLP on states and actions.

All members of an ensemble are one module that maps a batch per member to rewards [E, N]. The MLPs share one batched
matrix product per layer. Convolutions run member by member: grouped convolutions took two to three times as long on a
CPU (64, 100 and 200 pixels), while the channels-last layout saves a third.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from rl_vlm.config import RewardModelSection
from rl_vlm.types import UserInputError

_SQUASH: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "relu": nn.ReLU}
_LAST_LAYER = 1e-3  # bound of the last layer's initial weights: rewards begin near 0 and near each other


class ImageCNN(nn.Module):
    """Convolutions with ReLU, then one linear layer: float images [N, 3, H, W] in [0, 1] to [N].

    The layers are RL-VLM-F's. The initial weights are He's (2015, equation 10) and pixels are scaled to [-1, 1], because with
    RL-VLM-F's small uniform weights and pixels from 0 the loss hardly falls in the first hundreds of gradient steps
    (MetaWorld's drawer-open, 300 pairs, 60 steps: rank correlation with the true reward 0.73 to 0.76 against 0.85 to 0.87).
    """

    def __init__(self, height: int, width: int, settings: RewardModelSection) -> None:
        super().__init__()
        kernels, channels, strides = settings.kernels, settings.channels, settings.strides
        if not len(kernels) == len(channels) == len(strides):
            raise UserInputError(
                f"The reward CNN needs as many kernels ({len(kernels)}) as channels ({len(channels)}) and strides "
                f"({len(strides)})."
            )
        layers: list[nn.Module] = []
        before = 3
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
        """[N, 3, H, W] to [N]."""
        return self.squash(self.last(self.features(2 * images - 1).flatten(1)))[:, 0]  # type: ignore[no-any-return]


def resnet18(weights: str | Path | None = None) -> nn.Module:
    """torchvision's ResNet-18 with one output, from scratch or from a local file of ImageNet weights (.safetensors, .pth).

    As in the original its output is not squashed. Raises UserInputError if the file does not fit.
    """
    import torchvision

    network = torchvision.models.resnet18(num_classes=1)
    if weights is not None:
        state = _read_weights(Path(weights))
        state = {name: tensor for name, tensor in state.items() if not name.startswith("fc.")}
        try:
            missing, unexpected = network.load_state_dict(state, strict=False)
        except RuntimeError as error:
            raise UserInputError(f"The weights in {weights} are not those of a ResNet-18: {error}") from error
        if unexpected or [name for name in missing if not name.startswith("fc.")]:
            raise UserInputError(f"The weights in {weights} are not those of a ResNet-18.")
    return network


def _read_weights(path: Path) -> dict[str, Tensor]:
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:
        # torch and safetensors raise many kinds; all mean that the file cannot be used.
        raise UserInputError(f"Cannot read the weights in {path}: {error}") from error


class ImageMembers(nn.Module):
    """Image networks of E members. Inputs are uint8 [N, H, W, 3], which is the channels-last layout already."""

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleList(network.to(memory_format=torch.channels_last) for network in networks)  # type: ignore[call-overload]

    def forward(self, inputs: Sequence[Tensor]) -> Tensor:
        """One batch per member, to [E, N]."""
        rewards = []
        for network, frames in zip(self.networks, inputs, strict=True):
            rewards.append(network(frames.permute(0, 3, 1, 2).float() / 255).reshape(len(frames)))
        return torch.stack(rewards)


class MLPMembers(nn.Module):
    """E multilayer perceptrons with LeakyReLU as stacked weights: inputs float32 [N, D]."""

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
        """One batch per member, to [E, N]."""
        hidden = torch.stack(list(inputs))
        last = len(self.weights) - 1
        for number, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            hidden = torch.baddbmm(bias, hidden, weight)
            if number < last:
                hidden = nn.functional.leaky_relu(hidden)
        return self.squash(hidden)[..., 0]  # type: ignore[no-any-return]
