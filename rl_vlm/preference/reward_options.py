"""What can be chosen of a reward model. Without torch: the configuration, and with it every command, reads this."""

from __future__ import annotations

from dataclasses import dataclass, field

from rl_vlm.config.reward_model import Architecture, Squash
from rl_vlm.preference.examples import TargetOptions


@dataclass(frozen=True, slots=True)
class EnsembleOptions:
    """The reward model and how it is trained. Defaults are RL-VLM-F's, `min_gradient_steps` apart.

    architecture: "cnn" and "resnet18" look at pictures, "mlp" at states and actions.
    size: members. lr: of one Adam for all. batch: pairs per gradient step and member; None: 64 (ResNet 32, MLP 128).
    stride: every stride-th pixel of a picture is seen.
    epochs: passes over all pairs per session; they end early above `stop_accuracy`, but not before
    `min_gradient_steps` in a session: with few pairs the accuracy on them is high long before the reward is right.
    capacity: pairs that are kept.
    """

    architecture: Architecture = "cnn"
    size: int = 3
    lr: float = 3e-4
    batch: int | None = None
    epochs: int = 10
    stop_accuracy: float = 0.97
    min_gradient_steps: int = 60
    targets: TargetOptions = field(default_factory=TargetOptions)
    capacity: int = 20_000
    stride: int = 1
    kernels: tuple[int, ...] = (5, 3, 3, 3)
    channels: tuple[int, ...] = (16, 32, 64, 128)
    strides: tuple[int, ...] = (3, 2, 2, 2)
    hidden: int = 256
    layers: int = 3
    squash: Squash = "tanh"
    weights: str | None = None
    device: str = "cpu"

    @property
    def batch_size(self) -> int:
        """Pairs per gradient step and member."""
        return self.batch or {"cnn": 64, "resnet18": 32, "mlp": 128}[self.architecture]
