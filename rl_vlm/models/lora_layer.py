"""A LoRA layer whose update is two thin products in the activations' type. Imports peft, which takes seconds."""

from __future__ import annotations

from typing import Any

from peft.tuners.lora import Linear
from torch import Tensor, nn

from rl_vlm.models.kernels import lora_sum


class FastLora(Linear):  # type: ignore[misc]
    """peft's layer by `lora_sum`: in 16 bits A and B are rounded as engines round them.

    The product with the frozen weight stays the base layer's own, so that a strategy can gather that weight around it.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """x [..., in] → [..., out]."""
        out: Tensor = self.base_layer(x)
        if self.disable_adapters:
            return out
        (name,) = self.active_adapters
        return lora_sum(out, x, self.lora_A[name].weight, self.lora_B[name].weight, self.scaling[name])


def use_fast_lora(model: nn.Module) -> None:
    """Let the linear LoRA layers of a model compute by `FastLora`."""
    for module in model.modules():
        if type(module) is Linear:  # a subclass may compute something else
            module.__class__ = FastLora
