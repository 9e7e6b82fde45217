"""WeightAverage: an exponential moving average of the trained weights, which evaluation and export can use."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class WeightAverage:
    """average = decay · average + (1 - decay) · weights after each optimiser step; it begins at the given weights.

    A and B of LoRA are averaged each on their own, so the average is not that of their products.
    """

    def __init__(self, weights: Mapping[str, Tensor], decay: float) -> None:
        self._decay = decay
        self._average = {name: tensor.detach().clone() for name, tensor in weights.items()}

    @torch.no_grad()
    def update(self, weights: Mapping[str, Tensor]) -> None:
        """After an optimiser step."""
        for name, average in self._average.items():
            average.lerp_(weights[name].detach(), 1 - self._decay)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The average by name, not copied."""
        return self._average

    def state(self) -> dict[str, Tensor]:
        """The average by name, on the CPU."""
        return {name: tensor.cpu().clone() for name, tensor in self._average.items()}

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state` returned."""
        for name, average in self._average.items():
            average.copy_(state[name])
