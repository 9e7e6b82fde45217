"""`rl-vlm plan`: the memory plan of a run on this machine's GPUs, or on the card that its recipe names."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rl_vlm.config import CommonConfig, PolicyConfig, TrainConfig
from rl_vlm.models.hub import fetch_config
from rl_vlm.models.loading import SUPPORTED_FAMILIES, DType, builtin_models, from_folder, resolve_model
from rl_vlm.models.memory.needs import Card, MemoryPlan, gib, plan_memory, published_bytes
from rl_vlm.models.memory.shape import GIB, ModelShape, amount, text
from rl_vlm.types import UserInputError

_VERSIONS = 3  # of the adapter, in the object store at one time
_FULL_VERSIONS = 4  # of all weights: those of an older version's last samples, too
_STORE_MIB = 256  # of the object store of a small run


def shape_of(model: str) -> ModelShape:
    """The shapes of `model.path`. Of a name of the hub that is not on this machine, only config.json is fetched.

    Raises UserInputError for a model that is nowhere, and FetchError where the hub cannot be reached.
    """
    if model in builtin_models():  # building it takes minutes
        return ModelShape.from_config(builtin_models()[model].config())
    try:
        return ModelShape.read(resolve_model(model))
    except UserInputError:
        if model.count("/") != 1 or model.startswith((".", "/", "~")):
            raise
        return ModelShape.read(fetch_config(model))


def make_plan(config: CommonConfig, gpu_gib: float | None = None, folder: Path | None = None) -> MemoryPlan:
    """The memory plan for GPUs of `gpu_gib` GiB; else for the smallest of this machine, else for the recipe's card.

    `folder`: of the model, where it is known. Raises UserInputError.
    """
    shape = shape_of(config.model.path) if folder is None else ModelShape.read(folder)
    card = gpu_gib or smallest_gpu_gib(config) or config.model.least_gpu_gib
    return plan_memory(config, shape, None if card is None else gib(card))


def smallest_gpu_gib(config: CommonConfig) -> float | None:
    """Memory of this machine's smallest GPU, where the run asks for one and there is one. torch is imported only
    then."""
    if not config.needed_gpus or not _has_nvidia():
        return None
    import torch

    gpus = range(torch.cuda.device_count())
    return min((torch.cuda.get_device_properties(k).total_memory / GIB for k in gpus), default=None)


def adapters_mib(config: CommonConfig) -> int:
    """What versions take in the object store: the newest, the one that replicas still load, and one that is made."""
    if not isinstance(config, PolicyConfig) or config.model.path in builtin_models():  # theirs are small
        return 0
    return math.ceil(_versions(config) * published_bytes(config, shape_of(config.model.path)) / 2**20)


def _versions(config: CommonConfig) -> int:
    if not config.trains_full:
        return _VERSIONS
    return _FULL_VERSIONS + (
        config.learner.num_learners > 0
    )  # and the learner's own answer, where it is another process


def object_store_mib(config: CommonConfig) -> int:
    """The object store of a private cluster. Raises UserInputError where the configuration's is too small for the
    adapter."""
    needed, given = adapters_mib(config), config.resources.object_store_mib
    if given is None:
        return max(_STORE_MIB, needed + _STORE_MIB // 2)
    if given < needed:
        raise UserInputError(
            f"resources.object_store_mib {given} is too small: {_versions(config)} versions of this run's "
            f"{_published(config)}, take {needed} MiB. Set it to {needed + _STORE_MIB // 2} or leave it out."
        )
    return given


def _published(config: CommonConfig) -> str:
    return "weights" if config.trains_full else f"adapter, of rank {config.lora_rank}"


def _has_nvidia() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()


def describe(config: CommonConfig, plan: MemoryPlan) -> Iterator[str]:
    """The plan as lines for people."""
    yield f"{config.name}: {config.model.path}, {amount(plan.shape.parameters)} parameters"
    if plan.shape.family not in SUPPORTED_FAMILIES:
        yield f"Models of type {plan.shape.family} are planned, and not served or trained yet."
    for card in plan.cards:
        yield from _card(card, plan.gpus)
    if plan.adapter_bytes:
        what, digits = "the weights" if config.trains_full else "the adapter", 0 if plan.adapter_bytes > 1e7 else 2
        yield f"A version of {what}: {plan.adapter_bytes / 1e6:.{digits}f} MB"
    if plan.starved:
        yield f"It does not fit. {plan.starved}"
    if any(card.left is not None and card.left < 0 for card in plan.cards):
        yield f"It does not fit: {advice(config)}"


def _card(card: Card, gpus: int) -> Iterator[str]:
    of = f" of {text(card.size)}" if card.size else ""
    if gpus:
        yield f"{card.count} GPU{'s' if card.count > 1 else ''}{of}{', each' if card.count > 1 else ''}:"
    else:
        yield "No GPU is asked for; in main memory:"
    for process in card.processes:
        yield f"  {process.kind:<26}{text(process.bytes):>12}"
        for part in process.parts:
            yield f"    {part.name:<24}{text(part.bytes):>12}  {part.detail}"
    if card.left is not None:
        turns = "  keys and values take turns with the update" if card.turns else ""
        yield f"  {'left':<26}{text(card.left):>12}{turns}"


def advice(config: CommonConfig) -> str:
    """What makes a run smaller, one sentence."""
    steps = []
    if isinstance(config, PolicyConfig):
        if not config.learner.gradient_checkpointing:
            steps.append("set learner.gradient_checkpointing=true")
        steps.append(f"lower learner.micro_batch_tokens ({config.learner.micro_batch_tokens})")
    if config.serves:
        if config.serving.expected_engine == "vllm" and not config.serving.vllm.rest_while_learning:
            steps.append(f"lower serving.vllm.gpu_memory_utilization ({config.serving.memory_utilization:g})")
        elif config.serving.expected_engine != "vllm":
            steps.append(f"lower serving.max_rows ({config.serving.max_rows})")
        steps.append(f"lower serving.max_context ({config.serving.max_context})")
    if config.model.dtype == "float32":
        steps.insert(0, "set model.dtype=bfloat16")
    return ", ".join(steps[:-1]) + f", or {steps[-1]}." if len(steps) > 1 else "use a larger GPU."


def short_form(plan: MemoryPlan) -> dict[str, Any]:
    """The plan in a line per kind of GPU, for `--dry-run`."""
    summary: dict[str, Any] = {}
    for number, card in enumerate(plan.cards):
        held = ", ".join(f"{process.kind} {text(process.bytes)}" for process in card.processes)
        left = "" if card.left is None else f", {text(card.left)} left of {text(card.size or 0)}"
        name = "memory" if len(plan.cards) == 1 else f"memory_{number}"
        summary[name] = f"{held}{left}" + (f" (on each of {card.count} GPUs)" if card.count > 1 else "")
    return summary


# What checks before a run share: the model's size, and the memory that it needs.

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def memory_needs(config: TrainConfig, folder: Path) -> dict[str, Any]:
    """What the model weighs in the run's precision, and the GPU memory that the recipe states."""
    summary = weights_size(count_parameters(folder), config.model.dtype)
    if config.needed_gpus:
        import torch

        here = torch.cuda.device_count()
        summary["gpus"] = f"{config.needed_gpus:g} needed, {here} here"
        if config.model.gpu_memory_gib:
            summary["gpu_memory_gib"] = f"{config.model.gpu_memory_gib:g} needed per GPU"
    object_store_mib(config)  # raises where it is too small
    return summary | short_form(make_plan(config, folder=folder))


def weights_size(parameters: int, dtype: DType) -> dict[str, Any]:
    """What that many parameters weigh, to be printed."""
    return {
        "parameters": amount(parameters),
        "weights_gib": round(parameters * _BYTES[dtype] / 2**30, 2),
    }


def count_parameters(folder: Path) -> int:
    """The parameters of a model folder, from the headers of its safetensors files; without those from its
    configuration.

    Tied weights count once. Raises UserInputError when a file is damaged.
    """
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return sum(_elements(file) for file in files)
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(from_folder(AutoConfig, folder), trust_remote_code=False)
    return sum(parameter.numel() for parameter in model.parameters())


def _elements(file: Path) -> int:
    try:
        with safe_open(file, framework="numpy") as weights:  # reads the header; no tensor, and no torch
            return sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserInputError(
            f"The weights {file} cannot be read ({error}): fetch or export the model again."
        ) from error
