"""LoRA layers through peft: configuration, injection, state."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from peft import LoraConfig, get_peft_model_state_dict, inject_adapter_in_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from rl_vlm.models.lora import TARGET_MODULES, TOWER_PATTERN
from rl_vlm.models.weights import PREFIX
from rl_vlm.types import UserInputError

NOTHING_TO_TRAIN = "model.lora.target_modules none leaves nothing to train: choose attn, mlp, all or vision."


def lora_config(rank: int, alpha: int, target_modules: str) -> LoraConfig:
    """LoRA on linear layers of the language model, and with `vision` on those of the tower, which else stays frozen.

    Raises UserInputError for `none`, which leaves nothing to train.
    """
    names = TARGET_MODULES[target_modules]
    if not names:
        raise UserInputError(NOTHING_TO_TRAIN)
    language = rf".*language_model.*\.({'|'.join(names)})"
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,  # its noise would exceed the difference between the old and the new policy
        target_modules=f"{language}|{TOWER_PATTERN}" if target_modules == "vision" else language,
        task_type="CAUSAL_LM",
    )


def inject_lora(model: nn.Module, config: LoraConfig) -> nn.Module:
    """Put trainable LoRA layers (float32) into `model` in place; everything else is frozen."""
    model.requires_grad_(False)
    inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)
    return model


class ExtraLora:
    """A second trainable LoRA adapter (float32) in the layers of the first, which stays the active one.

    Args:
        model: with the first adapter injected.
        config: the second one's.
        name: peft's name of it.
    """

    def __init__(self, model: nn.Module, config: LoraConfig, name: str) -> None:
        trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # on purpose
            inject_adapter_in_model(config, model, adapter_name=name)
        self._name = name
        self._layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
        self.parameters = {n: p for n, p in model.named_parameters() if "lora_" in n and f".{name}." in n}
        for parameter in self.parameters.values():
            parameter.data = parameter.data.float()
        self._trainable = [*trainable, *self.parameters.values()]
        self._current = ""
        self._switch("default")

    @contextmanager
    def active(self) -> Iterator[None]:
        """Inside, the model computes with this adapter instead of the first. May be entered again inside."""
        before = self._current
        self._switch(self._name)
        try:
            yield
        finally:
            self._switch(before)

    def _switch(self, name: str) -> None:
        if name == self._current:
            return
        self._current = name
        for layer in self._layers:
            layer.set_adapter(name)
        # peft freezes what is not active; the optimiser steps both.
        for parameter in self._trainable:
            parameter.requires_grad_(True)


def lora_state(model: nn.Module) -> dict[str, Tensor]:
    """peft's state dict of the injected adapter, named as in an adapter file."""
    state = get_peft_model_state_dict(model)
    return {name if name.startswith(PREFIX) else PREFIX + name: tensor for name, tensor in state.items()}


def load_lora_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy an adapter into the injected LoRA layers; raises if a tensor is missing or has another shape."""
    own = lora_state(model)
    if own.keys() != state.keys():
        difference = sorted(own.keys() ^ state.keys())[:3]
        raise UserInputError(
            f"The adapter does not fit the model: tensors differ, for example {', '.join(difference)}."
        )
    for name, tensor in state.items():
        if own[name].shape != tensor.shape:
            raise UserInputError(
                f"The adapter does not fit the model: {name} is {tuple(tensor.shape)}, expected {tuple(own[name].shape)}."
            )
    set_peft_model_state_dict(model, {name.removeprefix(PREFIX): tensor for name, tensor in state.items()})


def seed_lora(seed: int) -> None:
    """Seed torch before `inject_lora`, so that A is drawn the same in every learner."""
    torch.manual_seed(seed)
