"""The weights of the transformers engine: the base model's, or those with an adapter.

Both ways change nothing but linear layers, and switch between base and adapter at once.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from rl_vlm.models.adapter import PREFIX, AdapterPayload
from rl_vlm.models.lora import LoraFactors, adaptable_linears, linear_weights, lora_factors, merged_weights

_DOWN = ".lora_A.weight"  # at the end of a tensor's name

Formed = Mapping[str, Any]  # a prepared adapter: merged weights or LoRA factors by module name


@dataclass(frozen=True, slots=True)
class Version:
    """A policy version; `formed` is its prepared adapter, None without one."""

    number: int
    formed: Formed | None = None


class Weights(Protocol):
    """The linear weights of a model that can be with or without an adapter."""

    def form(self, payload: AdapterPayload) -> Formed:
        """Prepare an adapter while samples run. Raises UserInputError for one that does not fit the model."""
        ...

    def use(self, formed: Formed | None) -> None:
        """Compute with a prepared adapter, or with the base model. Costs no more than changing pointers."""
        ...

    def release(self, formed: Formed) -> None:
        """A prepared adapter will not be used any more."""
        ...


class MergedWeights:
    """The adapter is added to the weights: decoding costs the same with and without one, and the weights are stored twice.

    A third copy exists while a version is formed. For float32 on a CPU its memory is reused for the next version, because
    allocating fresh pages takes a third of the time of the sum itself.
    """

    def __init__(self, model: nn.Module) -> None:
        self._linears = adaptable_linears(model)
        self._base = linear_weights(model)
        self._reuses = all(w.device.type == "cpu" and w.dtype == torch.float32 for w in self._base.values())
        self._spare: Formed | None = None

    def form(self, payload: AdapterPayload) -> Formed:
        """Merge in float32, round to the model's precision."""
        spare, self._spare = self._spare, None
        return merged_weights(payload, self._base, spare)

    def release(self, formed: Formed) -> None:
        """Keep its memory for the next version, if that may overwrite it."""
        if self._reuses:
            self._spare = formed

    def use(self, formed: Formed | None) -> None:
        """Put the tensors in place."""
        weights = {**self._base, **(formed or {})}
        for name, linear in self._linears.items():
            linear.weight.data = weights[name]


class UnmergedWeights:
    """The adapter is computed beside the weights, y = W·x + (alpha / r) · B·A·x.

    For quantised weights: adding the adapter to four-bit numbers would round most of it away.
    """

    def __init__(self, model: nn.Module) -> None:
        self._linears = adaptable_linears(model)
        self._shapes = {name: (linear.out_features, linear.in_features) for name, linear in self._linears.items()}
        self._device = next(model.parameters()).device
        self._hooks: list[RemovableHandle] = []

    def form(self, payload: AdapterPayload) -> Formed:
        """Its factors on the device."""
        factors = lora_factors(payload, self._shapes)
        return {
            name: LoraFactors(down.to(self._device), up.to(self._device), scale)
            for name, (down, up, scale) in factors.items()
        }

    def use(self, formed: Formed | None) -> None:
        """Hook the adapted layers, and no others: a hook costs time even where it adds nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            self._linears[name].register_forward_hook(self._hook(factors)) for name, factors in (formed or {}).items()
        ]

    def release(self, formed: Formed) -> None:
        """Does nothing: factors are too small to reuse their memory."""

    @staticmethod
    def _hook(factors: LoraFactors) -> Any:
        down, up, scale = factors

        def add(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            # In float32, as the learner's LoRA layers compute.
            return output + (inputs[0].float() @ down.T @ up.T * scale).to(output.dtype)

        return add


class BoundedWeights:
    """Adapters of many policies: merged while their sums fit into `max_bytes`, computed beside the weights beyond.

    A policy that found no room is merged again with its next version, once there is some. Thread-safe where `Weights` must be:
    one thread forms while another uses and releases.
    """

    def __init__(self, model: nn.Module, max_bytes: int) -> None:
        self._merged, self._unmerged = MergedWeights(model), UnmergedWeights(model)
        self._sizes = {name: weight.nbytes for name, weight in linear_weights(model).items()}
        self._left = max_bytes
        self._lock = threading.Lock()

    def form(self, payload: AdapterPayload) -> Formed:
        """Merged weights, or a `Factors`."""
        names = [name.removeprefix(PREFIX).removesuffix(_DOWN) for name in payload.views() if name.endswith(_DOWN)]
        needed = sum(self._sizes.get(name, 0) for name in names)
        with self._lock:
            fits = needed <= self._left
            if fits:
                self._left -= needed
        if not fits:
            return Factors(self._unmerged.form(payload))
        try:
            return self._merged.form(payload)
        except BaseException:
            with self._lock:
                self._left += needed
            raise

    def use(self, formed: Formed | None) -> None:
        """Put merged weights in place, or hook the layers."""
        beside = isinstance(formed, Factors)
        self._merged.use(None if beside else formed)
        self._unmerged.use(formed if beside else None)

    def release(self, formed: Formed) -> None:
        """Give its room to the next version of any policy."""
        if not isinstance(formed, Factors):
            with self._lock:
                self._left += sum(self._sizes[name] for name in formed)
            self._merged.release(formed)


class Factors(dict[str, Any]):
    """A prepared adapter that is not merged: LoRA factors by module name."""
