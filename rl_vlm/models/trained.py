"""What a run trained, as it lies in a folder: an adapter in peft's format, or all weights."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rl_vlm.config import TrainedModelSection
from rl_vlm.config.serving import LoraSection
from rl_vlm.files import did_you_mean
from rl_vlm.models.loading import resolve_model
from rl_vlm.models.memory.shape import TARGET_MODULES
from rl_vlm.models.tensor_bytes import mapped, read_header
from rl_vlm.models.weights import (
    DOWN,
    PREFIX,
    AdapterPayload,
    FullPayload,
    LoraSettings,
    WeightPayload,
    check_finite,
    check_shapes,
    in_language_model,
)
from rl_vlm.types import POLICY, UserInputError

_KINDS: tuple[type[AdapterPayload] | type[FullPayload], ...] = (AdapterPayload, FullPayload)


def read_payload(folder: Path, version: int, policy: str = POLICY) -> WeightPayload:
    """Read the version in a folder, of either kind. Raises UserInputError."""
    return (FullPayload if is_full(folder) else AdapterPayload).read(folder, version, policy)


def is_full(folder: Path) -> bool:
    """Whether a folder holds all weights of a model as a run keeps them, not an adapter."""
    return (folder / FullPayload.CONFIG).is_file()


def trained_folder(folder: Path) -> Path | None:
    """The folder that holds what was trained: inside a run or a checkpoint, or this one, or the one inside it that peft
    named after its adapter; None where there is none."""
    places = [(folder / kind.FOLDER, kind) for kind in _KINDS] + [(folder, kind) for kind in _KINDS]
    named = [path.parent for path in folder.glob(f"*/{AdapterPayload.CONFIG}")]
    places += [(place, AdapterPayload) for place in named if len(named) == 1]
    return next((place for place, kind in places if (place / kind.CONFIG).is_file()), None)


def find_trained(*named: Path | str | None) -> Path | None:
    """The folder of trained weights that a command or `model.adapter` names, by itself or by its run; None: the base
    model. Raises UserInputError when two are named, or the named holds neither plain LoRA nor full weights."""
    given = [Path(name) for name in named if name is not None]
    if len(given) > 1:
        raise UserInputError("--adapter and --run-dir both name an adapter: give one of them.")
    if not given:
        return None
    trained = trained_folder(given[0])
    if not given[0].exists():
        raise UserInputError(f"There is no folder {given[0]}, of an adapter or a run.{did_you_mean(given[0])}")
    if trained is None:
        raise UserInputError(
            f"{given[0]} is neither a peft adapter folder nor a run folder: it holds no {AdapterPayload.CONFIG}, no "
            "adapter/ and no weights/."
        )
    if not is_full(trained):
        AdapterPayload.checked(trained, mapped)  # of which the header alone is read
    return trained


def initial_adapter(model: TrainedModelSection) -> AdapterPayload:
    """The adapter that training starts with, as version 1. Raises UserInputError where `model.lora` is another."""
    folder, wanted = find_trained(model.adapter), model.lora
    assert folder is not None
    payload = AdapterPayload.read(folder, 1)
    check_finite(payload.state(), f"The adapter {folder}")
    found = LoraSettings.read(folder, payload.config_json)
    if found.use_rslora:
        raise UserInputError(f"{folder} has use_rslora and cannot be continued: merge it into the model by peft.")
    _, header = read_header(payload.tensors)
    modules = [name.removeprefix(PREFIX).removesuffix(DOWN) for name in header if name.endswith(DOWN)]
    target_modules = target_choice(modules, wanted.target_modules)
    if (found.r, found.lora_alpha, target_modules) != (wanted.rank, wanted.alpha, wanted.target_modules):
        layers = target_modules or sorted({name.rsplit(".", 1)[-1] for name in modules})
        values = f"{{rank: {found.r}, alpha: {found.lora_alpha:g}, target_modules: {layers}}}"
        advice = f"set model.lora='{values}'" if target_modules else "train an adapter with one of our choices"
        raise UserInputError(
            f"model.adapter: {folder} has {values}, and model.lora says {wanted.rank}, {wanted.alpha} and "
            f"{wanted.target_modules}: {advice}."
        )
    return payload


def check_initial_adapter(model: TrainedModelSection) -> dict[str, Any]:
    """The folder that `model.adapter` names, to be printed; nothing without one. Raises UserInputError where its
    tensors have other names or shapes than training gives them in the model."""
    if (found := find_trained(model.adapter)) is None:
        return {}
    initial_adapter(model)
    check_trained(found, model.path, model.lora)
    return {"adapter": str(found)}


def check_trained(folder: Path, model: str, lora: LoraSection | None = None) -> None:
    """Raise UserInputError where a folder's weights have other names or shapes than the model has for them. With `lora`
    an adapter must have all layers that training adapts, not some. Headers alone are read."""
    from rl_vlm.models.lora import linear_shapes, lora_shapes, trained_tensors  # imports torch
    from rl_vlm.models.modules import empty_model

    tensors, about = (FullPayload if is_full(folder) else AdapterPayload).checked(folder, mapped)
    found = {name: tuple(one["shape"]) for name, one in read_header(tensors)[1].items()}
    own = empty_model(json.loads((resolve_model(model) / "config.json").read_text(encoding="utf-8")))
    if is_full(folder):
        wanted = {name: tuple(one.shape) for name, one in own.named_parameters()}
    elif lora is None:
        wanted = lora_shapes(found, LoraSettings.read(folder, about).r, linear_shapes(own))
    else:
        wanted = trained_tensors(own, lora)
    said = json.loads(about)
    base = said.get("base_model_name_or_path") or said.get("base_model") or "another model"
    other = f"{folder} was trained from {base} and not from {model}: name that model, or an adapter of this one."
    check_shapes(found, wanted, f"{other} It")


def target_choice(modules: Iterable[str], preferred: str = "") -> str | None:
    """The choice of `TARGET_MODULES` that adapts these modules, of several the preferred one; None where none does."""
    modules = list(modules)
    language = [module for module in modules if in_language_model(module)]
    if any(module.startswith("lm_head") for module in modules):
        return None
    names, adapts_tower = {module.rsplit(".", 1)[-1] for module in language}, len(language) < len(modules)
    names &= set(TARGET_MODULES["all"])  # beside which some families have layers of other names
    fitting = [name for name in TARGET_MODULES if set(TARGET_MODULES[name]) == names]
    fitting = [name for name in fitting if (name == "vision") == adapts_tower]
    return preferred if preferred in fitting else next(iter(fitting), None)
