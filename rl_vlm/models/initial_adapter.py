"""The adapter that training starts from (`model.adapter`): found, and compared with the LoRA that the configuration describes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rl_vlm.config import TrainedModelSection
from rl_vlm.models.adapter import PREFIX, AdapterPayload
from rl_vlm.types import UserInputError


def initial_adapter(model: TrainedModelSection, version: int = 1) -> AdapterPayload:
    """The adapter that `model.adapter` names, as a version. Raises UserInputError where it is not what `model.lora` describes."""
    check_initial_adapter(model)
    return AdapterPayload.read(initial_adapter_folder(model), version)


def initial_adapter_folder(model: TrainedModelSection) -> Path:
    """The folder of that adapter, which a run folder has inside. Raises UserInputError."""
    assert model.adapter is not None
    folder = Path(model.adapter)
    for place in (folder, folder / "adapter"):
        if (place / "adapter_config.json").is_file():
            return place
    raise UserInputError(
        f"model.adapter: {folder} is neither a peft adapter folder nor a run folder with an adapter/: it holds no "
        "adapter_config.json."
    )


def check_initial_adapter(model: TrainedModelSection) -> dict[str, Any]:
    """Compare rank, alpha and layers of `model.adapter` with `model.lora`, from headers alone.

    Returns what was found, to be printed; nothing without an adapter. Raises UserInputError, which says what to set.
    """
    if model.adapter is None:
        return {}
    from rl_vlm.models.lora import target_choice  # imports torch, which a dry run without an adapter does not need

    folder = initial_adapter_folder(model)
    try:
        config = json.loads((folder / "adapter_config.json").read_text())
        rank, alpha = int(config["r"]), config["lora_alpha"]
        with safe_open(folder / "adapter_model.safetensors", framework="numpy") as file:
            names = list(file.keys())
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise UserInputError(f"model.adapter: {folder} is no readable LoRA adapter ({error}).") from error
    # Only what our LoRA layers compute can be taken over.
    for key in ("use_dora", "use_rslora", "rank_pattern", "alpha_pattern", "modules_to_save"):
        if config.get(key):
            raise UserInputError(
                f"model.adapter: {folder} was made with {key}, which training cannot continue: use plain LoRA."
            )
    modules = [
        name.removeprefix(PREFIX).removesuffix(".lora_A.weight") for name in names if name.endswith(".lora_A.weight")
    ]
    wanted = model.lora
    found = target_choice(modules, wanted.target_modules)
    if (rank, alpha, found) != (wanted.rank, wanted.alpha, wanted.target_modules):
        advice = f"model.lora='{{rank: {rank}, alpha: {alpha}, target_modules: {found}}}'"
        what = f"rank {rank}, alpha {alpha} and target_modules {found or 'of its own'}"
        raise UserInputError(
            f"model.adapter: {folder} has {what}, and model.lora says {wanted.rank}, {wanted.alpha} and "
            f"{wanted.target_modules}: {f'set {advice}' if found else 'train an adapter with one of our choices'}."
        )
    return {"adapter": str(folder)}
