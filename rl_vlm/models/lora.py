"""The arithmetic of LoRA for engines that serve merged weights. Without peft, which takes eight seconds to import."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rl_vlm.models.memory.shape import ADAPTED
from rl_vlm.models.weights import PREFIX, WeightPayload
from rl_vlm.types import UserInputError

DOWN, UP = ".lora_A.weight", ".lora_B.weight"  # at the end of a tensor's name
TARGET_MODULES = ADAPTED
# The linear layers of the towers of Qwen2.5-VL and Qwen3-VL; the patch embedding is a convolution and is not adapted.
TOWER_PATTERN = (
    r".*visual\.(blocks|merger|deepstack_merger_list)\.(.*\.)?"
    r"(qkv|proj|gate_proj|up_proj|down_proj|linear_fc1|linear_fc2|mlp\.0|mlp\.2)"
)


def target_choice(modules: Iterable[str], preferred: str = "") -> str | None:
    """The choice of `TARGET_MODULES` that adapts layers with the names of these; None where it is none of them.

    Of several choices with equal layers the preferred one counts.
    """
    modules = list(modules)
    tower = [module for module in modules if re.fullmatch(TOWER_PATTERN, module)]
    language = [module for module in modules if "language_model" in module]
    if len(tower) + len(language) < len(modules):
        return None
    names = {module.rsplit(".", 1)[-1] for module in language}
    fitting = [
        choice
        for choice, layers in TARGET_MODULES.items()
        if set(layers) == names and (choice == "vision") == bool(tower)
    ]
    return preferred if preferred in fitting else next(iter(fitting), None)


class LoraFactors(NamedTuple):
    """The update of one linear layer, `scale * up @ down`: down float32 [r, in], up float32 [out, r], scale alpha / r."""

    down: Tensor
    up: Tensor
    scale: float


def _refuse_other_tensors(names: Iterable[str]) -> None:
    """Raise UserInputError for what would be left out: trained heads and embeddings, biases, a matrix without the other."""
    known = set(names)
    pairs = {end for name in known if name.endswith(DOWN) for end in (name, name.removesuffix(DOWN) + UP)}
    if other := sorted(known - pairs):
        raise UserInputError(
            f"The adapter holds {len(other)} tensors that are no LoRA of a linear layer, such as {other[0].removeprefix(PREFIX)}: they "
            "cannot be served as an adapter; merge it into the model with peft, and give the merged model's folder."
        )


def lora_factors(payload: WeightPayload, shapes: Mapping[str, tuple[int, int]]) -> dict[str, LoraFactors]:
    """The factors of every layer that an adapter changes (LoRA, arXiv 2106.09685, equation 3), by module name.

    `shapes` holds (out, in) of the layers that it may change. Raises UserInputError for an adapter that does not fit.
    """
    try:
        config = json.loads(payload.config_json)
        rank, alpha = config["r"], config["lora_alpha"]
    except (ValueError, TypeError, KeyError) as error:
        raise UserInputError(f"Adapter version {payload.version} has no LoRA configuration ({error!r}).") from error
    if config.get("use_dora") or config.get("rank_pattern") or config.get("alpha_pattern"):
        raise UserInputError("Adapters with DoRA or per-layer ranks cannot be merged by this engine: use engine vllm.")
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    state = payload.views()
    _refuse_other_tensors(state)
    factors: dict[str, LoraFactors] = {}
    for name, down in state.items():
        if not name.endswith(DOWN):
            continue
        module = name.removeprefix(PREFIX).removesuffix(DOWN)
        if module not in shapes:
            raise UserInputError(f"The adapter does not fit the model: it adapts {module}, which the model lacks.")
        up, wanted = state.get(name.removesuffix(DOWN) + UP), shapes[module]
        found = None if up is None else (*up.shape, *down.shape)
        if up is None or found != (wanted[0], rank, rank, wanted[1]):
            raise UserInputError(
                f"The adapter does not fit the model: its matrices for {module} of {wanted} are "
                f"{'incomplete' if found is None else found}, rank {rank}."
            )
        if not torch.isfinite(up.sum() + down.sum()):  # sums are finite where all values are, and cost one pass
            raise UserInputError(f"Adapter version {payload.version} has values that are not finite, for {module}.")
        factors[module] = LoraFactors(down.float(), up.float(), scale)
    return factors


def merged_weights(
    payload: WeightPayload, base: Mapping[str, Tensor], spare: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The weights of every adapted linear layer with the adapter merged in: W + (alpha / r) · B·A, by module name.

    `base` holds the layers' own weights [out, in] by module name; the sum is formed in float32. `spare` is an earlier
    result of float32 weights that is no longer in use: its memory is overwritten.
    """
    shapes = {name: (weight.shape[0], weight.shape[1]) for name, weight in base.items()}
    merged: dict[str, Tensor] = {}
    for name, (down, up, scale) in lora_factors(payload, shapes).items():
        weight = base[name]
        out = spare.get(name) if spare is not None else None
        total = torch.addmm(weight.float(), up.to(weight.device), down.to(weight.device), alpha=scale, out=out)
        merged[name] = total.to(weight.dtype)
    return merged


def language_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The language model's linear layers by module name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and "language_model" in name
        and name.rsplit(".", 1)[-1] in TARGET_MODULES["all"]
    }


def tower_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The vision tower's linear layers by module name, which an adapter of target_modules `vision` changes too."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and re.fullmatch(TOWER_PATTERN, name)
    }


def adaptable_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """All linear layers that an adapter may change, by module name."""
    return {**language_linears(model), **tower_linears(model)}


def linear_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights [out, in] of these layers by module name."""
    return {name: module.weight.data for name, module in adaptable_linears(model).items()}


def changes_tower(modules: Iterable[str]) -> bool:
    """Whether any of these modules belongs to the vision tower: then features of images depend on the adapter."""
    return any(re.fullmatch(TOWER_PATTERN, module) for module in modules)
