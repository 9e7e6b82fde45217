"""What a learner trains of a model: LoRA layers, or all weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from rl_vlm.models.lora import inject_lora, load_lora_state, lora_state
from rl_vlm.models.shared_memory import VersionRoom
from rl_vlm.models.weights import AdapterPayload, FullPayload, WeightPayload, check_fits


class LoraTraining:
    """The LoRA layers (float32) of a model, which are trained; `parameters` are what the optimiser steps."""

    def __init__(self, model: nn.Module, config: LoraConfig) -> None:
        self._model, self._config = model, config
        inject_lora(model, config)
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def weights(self) -> dict[str, Tensor]:
        """What is trained by the names of its files, float32, not copied."""
        return lora_state(self._model)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Put such tensors in place. Raises UserInputError for ones that do not fit."""
        load_lora_state(self._model, state)

    def payload(
        self, version: int, weights: Mapping[str, Tensor], dtype: str | None = None, room: VersionRoom | None = None
    ) -> WeightPayload:
        """Such tensors as an immutable version, rounded where `dtype` is given. `room`: where all weights go."""
        return AdapterPayload.build(version, weights, self._config, dtype)

    def stepped(self) -> None:
        """Called when the optimiser has changed `parameters`."""

    @contextmanager
    def base(self) -> Iterator[None]:
        """Inside, the model computes as before training."""
        layers = [module for module in self._model.modules() if isinstance(module, LoraLayer)]
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)


class FullTraining:
    """As `LoraTraining`, of all parameters, the vision tower's too.

    Parameters in bfloat16 get float32 masters, which the optimiser steps; the model computes with what these round to,
    as every replica does. A parameter's gradient is added to its master's in float32 and freed (mixed precision: arXiv
    1710.03740, section 3.1). `reload` reads the model's first parameters by name, from the folder `base`; `keep_base`
    keeps them in memory, for the reference of a KL penalty in every update.
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
        return {name: master.detach() for name, master in self._masters.items()}

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        check_fits(state, self._own, "The checkpoint")
        for name, master in self._masters.items():
            self._put(master, state[name])
        self.stepped()

    def _put(self, master: Tensor, value: Tensor) -> None:
        master.copy_(value)

    def payload(
        self, version: int, weights: Mapping[str, Tensor], dtype: str | None = None, room: VersionRoom | None = None
    ) -> WeightPayload:
        return FullPayload.build(version, weights, self._base_name, dtype, room)

    @torch.no_grad()
    def stepped(self) -> None:
        for name, own in self._own.items():
            if own is not self._masters[name]:
                own.copy_(self._masters[name])

    @contextmanager
    def base(self) -> Iterator[None]:
        base = self._kept if self._kept is not None else self._reload()
        trained: dict[str, Tensor] = {}
        try:
            for name, own in self._own.items():
                trained[name] = self._swap(own, base[name])
            yield
        finally:
            for name, value in trained.items():
                self._swap(self._own[name], value)

    def _swap(self, own: Tensor, value: Tensor) -> Tensor:
        """Put a value in the place of a parameter's; returns what it was."""
        before, own.data = own.data, value
        return before


def _master(own: nn.Parameter) -> nn.Parameter:
    """The parameter itself, or a float32 copy that collects its gradients."""
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
