"""`preference.reward_model`: the reward ensemble.

Defaults are RL-VLM-F's, with its option in brackets; where ours differ, the description says so.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rl_vlm.config.section import Section

Architecture = Literal["cnn", "resnet18", "mlp"]
Squash = Literal["tanh", "sigmoid", "relu"]


class RewardModelSection(Section):
    """The reward ensemble."""

    architecture: Architecture = Field("cnn", description="[image_reward, resnet]")
    size: int = Field(3, ge=1, description="[ensemble_size]")
    lr: float = Field(3e-4, gt=0, description="[reward_lr]")
    batch: int | None = Field(None, ge=1, description="Pairs per gradient step; by default 64, ResNet 32, MLP 128.")
    epochs: int = Field(10, ge=1, description="Per session. [reward_update]")
    stop_accuracy: float = Field(0.97, gt=0, description="Ends a session early. Above 1: never.")
    # With few pairs the accuracy on them is high long before the reward is right.
    min_gradient_steps: int = Field(60, ge=0, description="Per session, whatever the accuracy; the original: 0.")
    soft_labels: bool = Field(False, description="Train on the label's probabilities where they are known.")
    label_margin: float = Field(0.0, ge=0, lt=0.5, description="m turns a hard label into (1 - m, m).")
    ties: Literal["skip", "half"] = Field("skip", description="half: train on undecided pairs as (1/2, 1/2).")
    stride: int = Field(1, ge=1, description="See every stride-th pixel. [resize_factor]")
    kernels: tuple[int, ...] = Field((5, 3, 3, 3), description="[conv_kernel_sizes]")
    channels: tuple[int, ...] = Field((16, 32, 64, 128), description="[conv_n_channels]")
    strides: tuple[int, ...] = Field((3, 2, 2, 2), description="[conv_strides]")
    hidden: int = Field(256, ge=1, description="Width of the MLP.")
    layers: int = Field(3, ge=1, description="Hidden layers of the MLP.")
    squash: Squash = Field("tanh", description="[activation]")
    weights: str | None = Field(None, description="A local file of ImageNet weights for resnet18.")
    load: str | None = Field(None, description="A saved reward model to begin with. [reward_model_load_dir]")

    @property
    def batch_size(self) -> int:
        """Pairs per gradient step and member."""
        return self.batch or {"cnn": 64, "resnet18": 32, "mlp": 128}[self.architecture]
