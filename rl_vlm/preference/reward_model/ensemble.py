"""The reward ensemble: several networks, whose mean is the reward."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from rl_vlm.config import RewardModelSection
from rl_vlm.labelling.types import InputKind, Segment, SegmentPair
from rl_vlm.preference.reward_model.networks import ImageCNN, ImageMembers, MLPMembers, resnet18
from rl_vlm.types import UserInputError

_INFERENCE_ROWS = {"image": 128, "state_action": 8192}


class RewardEnsemble:
    """Implements `RewardModel`.

    Args:
        input_shape: (H, W, 3) of the pictures, or (O + A,).
        settings: the networks and how they are trained.
        seed: of the initial weights.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        settings: RewardModelSection | None = None,
        seed: int = 0,
        *,
        device: str = "cpu",
    ) -> None:
        self.settings = settings or RewardModelSection()
        self.device = device
        self._shape = _input_shape(tuple(input_shape), self.settings)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.members = _build(self._shape, self.settings).to(device)

    @property
    def input_kind(self) -> InputKind:
        """What its inputs are."""
        return "state_action" if self.settings.architecture == "mlp" else "image"

    def rewards(self, inputs: np.ndarray) -> np.ndarray:
        """float32 [N], the mean of the members; inputs uint8 [N, H, W, 3] or float32 [N, O + A]."""
        return self.member_rewards(inputs).mean(0)

    def member_rewards(self, inputs: np.ndarray) -> np.ndarray:
        """float32 [E, N]."""
        inputs = self._subsampled(inputs)
        rows = _INFERENCE_ROWS[self.input_kind]
        self.members.eval()
        rewards = []
        with torch.inference_mode():
            for start in range(0, len(inputs), rows):
                batch = self._tensor(inputs[start : start + rows])
                rewards.append(self.members([batch] * self.settings.size).float().cpu())
        return torch.cat(rewards, 1).numpy() if rewards else np.empty((self.settings.size, 0), np.float32)

    def returns(self, batches: Sequence[np.ndarray]) -> Tensor:
        """[E, B, parts], with gradients: each member's returns of its own batch of segments [B, parts, T, ...]."""
        rows, parts = batches[0].shape[:2]
        inputs = [self._tensor(batch.reshape(-1, *batch.shape[3:])) for batch in batches]
        return self.members(inputs).reshape(len(batches), rows, parts, -1).sum(-1)  # type: ignore[no-any-return]

    def segment_returns(self, segments: Sequence[Segment]) -> np.ndarray:
        """float32 [E, N]: the sum of each member's rewards over each segment. All segments are equally long."""
        if not segments:
            return np.empty((self.settings.size, 0), np.float32)
        flat = np.concatenate([self.inputs_of(segment) for segment in segments])
        return self.member_rewards(flat).reshape(self.settings.size, -1, len(segments[0])).sum(-1)

    def preferences(self, pairs: Sequence[SegmentPair]) -> np.ndarray:
        """float32 [E, N]: each member's probability that the first segment is better (Bradley-Terry)."""
        returns = self.segment_returns([part for pair in pairs for part in (pair.first, pair.second)])
        difference = returns[:, 0::2] - returns[:, 1::2]
        return torch.sigmoid(torch.from_numpy(difference)).numpy()

    def inputs_of(self, segment: Segment) -> np.ndarray:
        """uint8 [T, H, W, 3], with every `stride`-th pixel, or float32 [T, O + A]. Raises UserInputError if they do not fit."""
        if self.input_kind == "state_action":
            inputs = np.concatenate([segment.observations, segment.actions], axis=1, dtype=np.float32)
        elif segment.frames is None:
            raise UserInputError("An image reward model needs segments with pictures: give the environment a camera.")
        else:
            inputs = segment.frames
        return self._subsampled(inputs)

    def _subsampled(self, inputs: np.ndarray) -> np.ndarray:
        """The inputs with every `stride`-th pixel. Raises UserInputError if they have another size."""
        stride = self.settings.stride
        if self.input_kind == "image" and stride > 1 and inputs.shape[1:] != self._shape:
            inputs = inputs[:, ::stride, ::stride]
        if inputs.shape[1:] != self._shape:
            raise UserInputError(f"The reward model sees inputs of {self._shape}, not of {inputs.shape[1:]}.")
        return inputs

    def _tensor(self, inputs: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(inputs)).to(self.device)


def _input_shape(shape: tuple[int, ...], settings: RewardModelSection) -> tuple[int, ...]:
    if settings.architecture == "mlp":
        if len(shape) != 1:
            raise UserInputError(
                f"A reward MLP sees states and actions, one row of numbers each, not inputs of {shape}."
            )
        return shape
    if len(shape) != 3 or shape[2] != 3:
        raise UserInputError(
            f"The reward model {settings.architecture} sees pictures (H, W, 3), not inputs of {shape}."
        )
    return -(-shape[0] // settings.stride), -(-shape[1] // settings.stride), 3


def _build(shape: tuple[int, ...], settings: RewardModelSection) -> nn.Module:
    if settings.architecture == "mlp":
        return MLPMembers(shape[0], settings)
    networks: list[nn.Module] = []
    for _ in range(settings.size):
        if settings.architecture == "resnet18":
            networks.append(resnet18(settings.weights))
        else:
            networks.append(ImageCNN(shape[0], shape[1], settings))
    return ImageMembers(networks)
