"""The arithmetic of LoRA for engines that serve merged weights. Without peft, which takes eight seconds to import."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from rl_vlm.models.adapter import PREFIX, AdapterPayload
from rl_vlm.types import UserInputError

# Names of the linear layers in the language model, by the choice that users know.
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
TARGET_MODULES: dict[str, tuple[str, ...]] = {"attn": _ATTENTION, "mlp": _MLP, "all": _ATTENTION + _MLP}


def target_choice(modules: Iterable[str], preferred: str = "") -> str | None:
    """The choice of `TARGET_MODULES` that adapts layers with the last names of these; None where it is none of them.

    Of several choices with equal layers the preferred one counts.
    """
    names = {module.rsplit(".", 1)[-1] for module in modules if "language_model" in module}
    if not all("language_model" in module for module in modules):
        return None
    fitting = [choice for choice, layers in TARGET_MODULES.items() if set(layers) == names]
    return preferred if preferred in fitting else next(iter(fitting), None)


class LoraFactors(NamedTuple):
    """The update of one linear layer, `scale * up @ down`: down float32 [r, in], up float32 [out, r], scale alpha / r."""

    down: Tensor
    up: Tensor
    scale: float


def lora_factors(payload: AdapterPayload, shapes: Mapping[str, tuple[int, int]]) -> dict[str, LoraFactors]:
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
    factors: dict[str, LoraFactors] = {}
    for name, down in state.items():
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        if module not in shapes:
            raise UserInputError(f"The adapter does not fit the model: it adapts {module}, which the model lacks.")
        up, wanted = state.get(name.replace("lora_A", "lora_B")), shapes[module]
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
    payload: AdapterPayload, base: Mapping[str, Tensor], spare: Mapping[str, Tensor] | None = None
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
    """The language model's linear layers by module name, the ones that an adapter may change."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and "language_model" in name
        and name.rsplit(".", 1)[-1] in TARGET_MODULES["all"]
    }


def linear_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights [out, in] of these layers by module name."""
    return {name: module.weight.data for name, module in language_linears(model).items()}
