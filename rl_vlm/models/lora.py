"""LoRA: its layers through peft, and its arithmetic for engines that serve merged weights, which need no peft."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from rl_vlm.models.families import family_of
from rl_vlm.models.memory.shape import TARGET_MODULES
from rl_vlm.models.weights import (
    DOWN,
    PREFIX,
    UP,
    FullPayload,
    LoraSettings,
    WeightPayload,
    check_finite,
    check_fits,
    check_shapes,
    in_language_model,
    put_weights,
)
from rl_vlm.types import UserInputError

if TYPE_CHECKING:
    from peft import LoraConfig  # takes eight seconds to import, which engines need not wait for

    from rl_vlm.config.serving import LoraSection

_OTHER = re.compile(r"\.(gate|base_layer|lora_\w+(\.\w+)?)$")  # routers of experts, and what adapters consist of


class LoraFactors(NamedTuple):
    """The update of a linear layer, `scale * up @ down`: float32 down [r, in], up [out, r]."""

    down: Tensor
    up: Tensor
    scale: float


def lora_factors(payload: WeightPayload, shapes: Mapping[str, tuple[int, int]]) -> dict[str, LoraFactors]:
    """The factors of every layer that an adapter changes (LoRA, arXiv 2106.09685, equation 3), by module name.

    `shapes` holds (out, in) of the layers that it may change. Raises UserInputError for one that does not fit.
    """
    settings, state = LoraSettings.read(f"version {payload.version}", payload.config_json), payload.state()
    what, found = f"Adapter version {payload.version}", {name: tuple(tensor.shape) for name, tensor in state.items()}
    check_shapes(found, lora_shapes(found, settings.r, shapes), what)
    check_finite(state, what)
    stems = (name.removesuffix(DOWN) for name in state if name.endswith(DOWN))
    return {
        stem.removeprefix(PREFIX): LoraFactors(state[stem + DOWN].float(), state[stem + UP].float(), settings.scale)
        for stem in stems
    }


def lora_shapes(names: Iterable[str], rank: int, shapes: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, ...]]:
    """The tensors that an adapter of this rank has for the layers of `names`, its own tensors, among those of `shapes`
    (out, in)."""
    wanted: dict[str, tuple[int, ...]] = {}
    for stem in (name.removesuffix(DOWN) for name in names if name.endswith(DOWN)):
        if (module := stem.removeprefix(PREFIX)) in shapes:
            rows, columns = shapes[module]
            wanted |= {stem + DOWN: (rank, columns), stem + UP: (rows, rank)}
    return wanted


def merged_weights(payload: WeightPayload, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """W + scale · B·A of every layer that an adapter changes, summed in float32. `base` holds the layers' own weights
    [out, in]; both by module name."""
    shapes = {name: (weight.shape[0], weight.shape[1]) for name, weight in base.items()}
    merged: dict[str, Tensor] = {}
    for name, (down, up, scale) in lora_factors(payload, shapes).items():
        weight = base[name]
        total = torch.addmm(weight.float(), up.to(weight.device), down.to(weight.device), alpha=scale)
        merged[name] = total.to(weight.dtype)
    return merged


def merge_into(model: nn.Module, payload: WeightPayload) -> None:
    """Add an adapter to a model in place, or put full weights there. Raises UserInputError where it does not fit."""
    if isinstance(payload, FullPayload):
        put_weights(model, payload)
        return
    linears = adaptable_linears(model)
    for name, weight in merged_weights(payload, linear_weights(model)).items():
        linears[name].weight.data = weight


def adaptable_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """All linear layers that an adapter may change, by module name: the language model's and the vision tower's."""
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    return {name: module for name, module in linears.items() if name != "lm_head" and not _OTHER.search(name)}


def linear_shapes(model: nn.Module) -> dict[str, tuple[int, int]]:
    """(out, in) of the layers that an adapter may change."""
    return {name: (one.out_features, one.in_features) for name, one in adaptable_linears(model).items()}


def linear_weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: module.weight.data for name, module in adaptable_linears(model).items()}


def changes_tower(modules: Iterable[str]) -> bool:
    """Whether any of these modules belongs to the vision tower: then features of images depend on the adapter."""
    return not all(map(in_language_model, modules))


# LoRA layers through peft: configuration, injection, state.

NOTHING_TO_TRAIN = "model.lora.target_modules none leaves nothing to train: choose attn, mlp, all or vision."


def _targets(model: nn.Module, target_modules: str) -> tuple[list[str], str]:
    """Names of linear layers in the language model, and a pattern of those in the tower, found by their places."""
    names, tower = list(TARGET_MODULES[target_modules]), set()
    for place, name in (module.rsplit(".", 1) for module in adaptable_linears(model)):
        if not in_language_model(f"{place}."):
            tower.add((place.split(".")[1], name))
        elif ".conv" not in place and name not in TARGET_MODULES["all"] + tuple(names):
            wanted = "attn" if "attn" in place else "mlp"
            names += [name] if target_modules not in ("attn", "mlp") or target_modules == wanted else []
    parts, leaves = ("|".join(sorted(set(found))) for found in zip(*tower, strict=True))
    # peft would adapt convolutions of these names, too.
    kernels = [name for name, module in model.named_modules() if isinstance(module, (nn.Conv2d, nn.Conv3d))]
    return names, rf"(?!.*({'|'.join(map(re.escape, kernels)) or 'none'})$).*\.({parts})\.(.*\.)?({leaves})"


def lora_config(rank: int, alpha: int, target_modules: str, model: Any = None) -> LoraConfig:
    """LoRA on the layers of `_pattern`. Raises UserInputError for `none`."""
    from peft import LoraConfig

    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=0.0,  # its noise would exceed the difference between the old and the new policy
        target_modules=_pattern(target_modules, model),
        task_type="CAUSAL_LM",
    )


def _pattern(target_modules: str, model: Any) -> str:
    """The names of adapted layers: of the language model, and with `vision` of the tower, of a Qwen3-VL if no model is
    given. Raises UserInputError for `none`."""
    if not TARGET_MODULES[target_modules]:
        raise UserInputError(NOTHING_TO_TRAIN)
    names, part = list(TARGET_MODULES[target_modules]), ".*language_model"
    tower = family_of("qwen3_vl" if model is None else model.config.model_type).lora_tower
    if not tower:
        names, tower = _targets(model, target_modules)
        part = r"(?!.*\.conv\.).*(language_model|text_model)"  # vLLM leaves short convolutions alone, too
    language = rf"{part}.*\.({'|'.join(names)})"
    return f"{language}|{tower}" if target_modules == "vision" else language


def trained_tensors(model: nn.Module, lora: LoraSection) -> dict[str, tuple[int, ...]]:
    """The tensors that training with these settings has in a model, with their shapes."""
    shapes, pattern = linear_shapes(model), _pattern(lora.target_modules, model)
    names = (PREFIX + name + DOWN for name in shapes if re.fullmatch(pattern, name))
    return lora_shapes(names, lora.rank, shapes)


def inject_lora(model: nn.Module, config: LoraConfig) -> nn.Module:
    """Put trainable LoRA layers (float32) into `model` in place; everything else is frozen."""
    from peft import inject_adapter_in_model

    from rl_vlm.models.lora_layer import use_fast_lora

    model.requires_grad_(False)
    inject_adapter_in_model(config, model)
    use_fast_lora(model)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()
            parameter.requires_grad_(True)
    return model


class ExtraLora:
    """A second trainable LoRA adapter (float32), `name` to peft, in the layers of the first, which stays active."""

    def __init__(self, model: nn.Module, config: LoraConfig, name: str) -> None:
        from peft import inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

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
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(model)
    return {name if name.startswith(PREFIX) else PREFIX + name: tensor for name, tensor in state.items()}


def load_lora_state(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy an adapter into the injected LoRA layers. Raises UserInputError where it does not fit."""
    from peft import set_peft_model_state_dict

    check_fits(state, lora_state(model), "The adapter")
    set_peft_model_state_dict(model, {name.removeprefix(PREFIX): tensor for name, tensor in state.items()})
