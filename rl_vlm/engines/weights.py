"""The weights of the transformers engine, which switches at once between versions that are prepared."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rl_vlm.models.kernels import lora_sum
from rl_vlm.models.lora import (
    LoraFactors,
    adaptable_linears,
    changes_tower,
    linear_weights,
    lora_factors,
    merged_weights,
)
from rl_vlm.models.weights import DOWN, PREFIX, WeightPayload, check_fits, require_full

Formed = Mapping[str, Any]  # prepared: merged weights or LoRA factors by module name, or all weights by their own names


@dataclass(frozen=True, slots=True)
class Version:
    """A policy version; `formed` are its prepared weights, None for the base model's."""

    number: int
    formed: Formed | None = None


class Factors(dict[str, LoraFactors]):
    """A prepared adapter that is not merged: LoRA factors by module name, on the model's device."""


class Merged(dict[str, Tensor]):
    """A prepared adapter that is merged: weights by module name."""

    __hash__ = object.__hash__  # type: ignore[assignment]  # compared by identity, to be counted while it lives
    __eq__ = object.__eq__


class AdapterWeights:
    """Adds adapters to the weights while the sums fit into `max_merged_bytes`, and computes others beside the weights.

    Decoding with a sum costs the same as without an adapter, and stores the weights once more. Weights of few bits take
    no sums: rounding would remove most of an adapter, and in bfloat16 all of a young one.

    One thread forms while another uses.
    """

    def __init__(self, model: nn.Module, max_merged_bytes: float = math.inf) -> None:
        self._linears = adaptable_linears(model)
        self._base = linear_weights(model)
        self._shapes = {name: (linear.out_features, linear.in_features) for name, linear in self._linears.items()}
        self._device, self._dtype = (parameter := next(model.parameters())).device, parameter.dtype
        self._max_merged_bytes = max_merged_bytes
        self._sums: weakref.WeakSet[Merged] = weakref.WeakSet()
        self._in_place = Merged()
        self._hooks: list[RemovableHandle] = []

    def form(self, payload: WeightPayload) -> Formed:
        """Prepare a version: sums, or `Factors` where there is no room. Raises UserInputError where it does not fit."""
        names = [name.removeprefix(PREFIX).removesuffix(DOWN) for name in payload.state() if name.endswith(DOWN)]
        sizes = [self._base[name].nbytes for sum_ in [names, *self._sums] for name in sum_ if name in self._base]
        if sum(sizes) > self._max_merged_bytes:
            return Factors(
                (name, LoraFactors(down.to(self._device, self._dtype), up.to(self._device, self._dtype), scale))
                for name, (down, up, scale) in lora_factors(payload, self._shapes).items()
            )
        merged = Merged(merged_weights(payload, self._base))
        self._sums.add(merged)
        return merged

    def use(self, formed: Formed | None) -> None:
        """Compute with a prepared version, or with the base model."""
        merged = formed if isinstance(formed, Merged) else Merged()
        for name in self._in_place.keys() | merged.keys():
            self._linears[name].weight.data = merged.get(name, self._base[name])
        self._in_place = merged
        for hook in self._hooks:
            hook.remove()
        factors = formed if isinstance(formed, Factors) else Factors()  # a hook costs time even where it adds nothing
        self._hooks = [
            self._linears[name].register_forward_hook(partial(_add_beside, one)) for name, one in factors.items()
        ]

    def changes_tower(self, formed: Formed | None) -> bool:
        """Whether a version has a vision tower of its own: then features of images depend on it."""
        return formed is not None and changes_tower(formed)


def _add_beside(factors: LoraFactors, _: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
    return lora_sum(output, inputs[0], *factors)  # as the learner's layers compute


class FullWeights:
    """Every version brings all weights (`model.train: full`). On a CPU the model computes with the payload's own bytes:
    those in Ray's shared memory serve all replicas of a node."""

    def __init__(self, model: nn.Module) -> None:
        self._own = dict(model.named_parameters())  # tied ones once
        self._base = {name: parameter.data for name, parameter in self._own.items()}

    def form(self, payload: WeightPayload) -> Formed:
        """All weights, in the model's precision and on its device."""
        state = require_full(payload).state()
        check_fits(state, self._base, f"Weight version {payload.version}")
        return {name: tensor.to(self._base[name]) for name, tensor in state.items()}

    def use(self, formed: Formed | None) -> None:
        weights = self._base if formed is None else formed
        for name, parameter in self._own.items():
            parameter.data = weights[name]

    def changes_tower(self, formed: Formed | None) -> bool:
        return formed is not None


Weights = AdapterWeights | FullWeights
