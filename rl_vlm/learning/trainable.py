"""Trainable: the part of a policy's model that is trained, LoRA layers beside frozen weights or all weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from rl_vlm.models.adapter import AdapterPayload
from rl_vlm.models.full_weights import FullPayload, check_fits
from rl_vlm.models.lora_layers import inject_lora, load_lora_state, lora_state
from rl_vlm.models.payload import WeightPayload


class Trainable(Protocol):
    """The trained part of a model. `parameters` are float32: what the optimiser steps."""

    parameters: list[nn.Parameter]

    def weights(self) -> dict[str, Tensor]:
        """The trained tensors by the names of their files, float32, not copied."""
        ...

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Put tensors with these names in place. Raises UserInputError for ones that do not fit."""
        ...

    def payload(self, version: int, weights: Mapping[str, Tensor], dtype: str | None = None) -> WeightPayload:
        """Tensors by these names as an immutable version, rounded where `dtype` is given."""
        ...

    def stepped(self) -> None:
        """The optimiser has changed `parameters`."""
        ...

    def base(self) -> AbstractContextManager[None]:
        """The model computes as before training inside this context."""
        ...


class LoraTraining:
    """LoRA layers (float32), by peft's names."""

    def __init__(self, model: nn.Module, config: LoraConfig) -> None:
        self._model, self._config = model, config
        inject_lora(model, config)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def weights(self) -> dict[str, Tensor]:
        """See Trainable."""
        return lora_state(self._model)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """See Trainable."""
        load_lora_state(self._model, state)

    def payload(self, version: int, weights: Mapping[str, Tensor], dtype: str | None = None) -> WeightPayload:
        """See Trainable."""
        return AdapterPayload.build(version, weights, self._config, dtype)

    def stepped(self) -> None:
        """Nothing to do: the optimiser steps the layers themselves."""

    @contextmanager
    def base(self) -> Iterator[None]:
        """See Trainable; the layers are switched off."""
        layers = [module for module in self._model.modules() if isinstance(module, LoraLayer)]
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)


class FullTraining:
    """All parameters, the vision tower's too. Those of a lower precision get float32 masters, which the optimiser steps.

    The model computes with what the masters round to, as every replica does. Gradients of a backward pass are added to the
    masters' in float32 as soon as a parameter has its own, which is then freed (mixed precision: arXiv 1710.03740, section 3.1).

    Args:
        model: the model, whose parameters are float32 or bfloat16.
        base: the folder that it was loaded from.
        reload: its parameters by name as that folder has them, in the model's precision.
        keep_base: keep them in memory, because the reference of a KL penalty needs them in every update; else `base` reads them
            from the folder each time.
    """

    def __init__(
        self, model: nn.Module, base: str, reload: Callable[[], dict[str, Tensor]], keep_base: bool = False
    ) -> None:
        self._base_name, self._reload = base, reload
        self._own = dict(model.named_parameters())  # tied parameters once
        model.requires_grad_(True)
        self._kept = {name: own.detach().clone() for name, own in self._own.items()} if keep_base else None
        self._masters = {name: _master(own) for name, own in self._own.items()}
        self.parameters = list(self._masters.values())

    def weights(self) -> dict[str, Tensor]:
        """See Trainable; the masters."""
        return {name: master.detach() for name, master in self._masters.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """See Trainable."""
        check_fits(state, self._own, 0)
        for name, master in self._masters.items():
            master.copy_(state[name])
        self.stepped()

    def payload(self, version: int, weights: Mapping[str, Tensor], dtype: str | None = None) -> WeightPayload:
        """See Trainable."""
        return FullPayload.build(version, weights, self._base_name, dtype)

    @torch.no_grad()
    def stepped(self) -> None:
        """See Trainable; the model gets what the masters round to."""
        for name, own in self._own.items():
            if own is not self._masters[name]:
                own.copy_(self._masters[name])

    @contextmanager
    def base(self) -> Iterator[None]:
        """See Trainable."""
        base = self._kept if self._kept is not None else self._reload()
        trained = {name: own.data for name, own in self._own.items()}
        try:
            for name, own in self._own.items():
                own.data = base[name]
            yield
        finally:
            for name, own in self._own.items():
                own.data = trained[name]


def _master(own: nn.Parameter) -> nn.Parameter:
    """The parameter itself where it is float32, else a float32 copy that collects its gradients."""
    if own.dtype == torch.float32:
        return own
    master = nn.Parameter(own.detach().float())

    def collect(parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.float()
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        parameter.grad = None

    own.register_post_accumulate_grad_hook(collect)
    return master
