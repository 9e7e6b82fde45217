"""`rl-vlm plan`: the memory plan of a run on this machine's GPUs, or on the card that its recipe names."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl_vlm.config import CommonConfig, PolicyConfig, TrainConfig
from rl_vlm.engines.vllm_limits import check_kernels
from rl_vlm.machine import multiplies_bfloat16
from rl_vlm.models.hub import fetch_config
from rl_vlm.models.loading import resolve_model
from rl_vlm.models.memory.parts import published_bytes
from rl_vlm.models.memory.reading import read_shape, shape_of_config
from rl_vlm.models.memory.shape import ELEMENT, GIB, ModelShape, amount, gib, text
from rl_vlm.models.modules import DType
from rl_vlm.registry import builtin_models
from rl_vlm.runs.memory_plan import Card, MemoryPlan, plan_memory
from rl_vlm.runs.surroundings import gpu_sizes
from rl_vlm.types import UserInputError

_STORE_MIB = 256  # of the object store of a small run
_FEW = 0.75  # of a GPU's memory for its only process, far below `FILLED`

logger = logging.getLogger(__name__)


def shape_of(model: str) -> ModelShape:
    """The shapes of `model.path`; of a hub name only config.json is fetched. Raises UserInputError."""
    if model in builtin_models():  # building it takes minutes
        return shape_of_config(builtin_models()[model].config())
    try:
        return read_shape(resolve_model(model))
    except UserInputError:
        if model.count("/") != 1 or model.startswith((".", "/", "~")):
            raise
        return read_shape(fetch_config(model))


def on_gpus(number: int, pairs: bool = False) -> list[str]:
    """Settings that place a run on so many GPUs: in pairs, or with a quarter of several GPUs for learners."""
    learners = number if pairs else max(number // 4, 1)
    replicas, share = (number, 0.5) if pairs or number == 1 else (number - learners, 1)
    return [f"resources.placement={'pairs' if pairs else 'split'}", f"serving.num_replicas={replicas}",
            f"serving.gpus_per_replica={share}", f"learner.num_learners={learners}",
            f"learner.gpus_per_learner={share}"]  # fmt: skip


def better_in_pairs(config: CommonConfig) -> bool:
    """Whether replicas and learners with GPUs of their own would wait for each other; or as the run says itself."""
    if config.resources.placement is not None:
        return config.in_pairs
    return isinstance(config, PolicyConfig) and not config.rollout.max_policy_lag


def make_plan(config: CommonConfig, gpu_gib: float | None = None, folder: Path | None = None) -> MemoryPlan:
    """The plan for GPUs of `gpu_gib` GiB, else for the smallest one here, else for the recipe's card."""
    shape = shape_of(config.model.path) if folder is None else read_shape(folder)
    here = gpu_sizes() if config.needed_gpus and not gpu_gib else []
    card = gpu_gib or min(here, default=config.model.least_gpu_gib)
    teacher = config.served_teacher.model.path if isinstance(config, PolicyConfig) and config.teacher else None
    return plan_memory(config, shape, None if card is None else gib(card), shape_of(teacher) if teacher else None)


def object_store_mib(config: CommonConfig) -> int:
    """As set, or room for the newest version, the one that replicas still load, and one that is made."""
    if config.resources.object_store_mib is not None:
        return config.resources.object_store_mib
    if not isinstance(config, PolicyConfig) or config.model.path in builtin_models():  # theirs are small
        return _STORE_MIB
    # Of all weights also that of an older version's last samples, and the answer of a learner that is another process.
    versions = 4 + (config.learner.num_learners > 0) if config.trains_full else 3
    needed = math.ceil(versions * published_bytes(config, shape_of(config.model.path)) / 2**20)
    return max(_STORE_MIB, needed + _STORE_MIB // 2)


def describe(config: CommonConfig, plan: MemoryPlan) -> Iterator[str]:
    """The plan as lines for people."""
    yield f"{config.name}: {config.model.path}, {amount(plan.parameters)} parameters"
    for card in plan.cards:
        yield from _card(card, plan.gpus)
    yield from remarks(config)
    if plan.adapter_bytes:
        what, digits = "the weights" if config.trains_full else "the adapter", 0 if plan.adapter_bytes > 1e7 else 2
        yield f"A version of {what}: {plan.adapter_bytes / 1e6:.{digits}f} MB"
    if plan.starved:
        yield f"It does not fit. {plan.starved}"
    if any(card.left is not None and card.left < 0 for card in plan.cards):
        yield (
            "It does not fit: set model.dtype=bfloat16 and learner.checkpoint=auto, or lower "
            "learner.micro_batch_tokens, serving.max_context, and serving.vllm.gpu_memory_utilization or "
            "serving.max_rows."
        )


def remarks(config: CommonConfig) -> Iterator[str]:
    """What to say of settings with which a run works, only worse than it could."""
    if config.model.dtype == "bfloat16" and not config.needed_gpus and not multiplies_bfloat16():
        yield "This CPU has no instructions for bfloat16, which takes many times as long: set model.dtype=float32."
    if isinstance(config, PolicyConfig) and config.serving.num_replicas > 1 and config.needed_gpus:
        if config.in_pairs:
            yield "In pairs all GPUs sample, and then all learn."
        elif not config.rollout.max_policy_lag:
            yield (
                "At rollout.max_policy_lag 0 replicas and learners wait for each other: resources.placement=pairs is "
                "faster, or a lag of 1."
            )
    if not config.serves or config.serving.expected_engine != "vllm":
        return
    share = config.serving.vllm.gpu_memory_utilization
    if share is not None and share < _FEW and config.serving.gpus_per_replica >= 1:
        yield (
            f"A replica has its GPU to itself and leaves {1 - share:.0%} of it empty: set "
            "serving.vllm.gpu_memory_utilization=null, which fills it."
        )
    if not isinstance(config, PolicyConfig) or config.trains_full or config.model.dtype == "float32":
        return
    lora = config.model.lora
    scale = lora.alpha / lora.rank
    if lora.target_modules != "none" and math.frexp(scale)[0] != 0.5:  # no power of two
        yield (
            f"vLLM multiplies an adapter by alpha / rank, {scale:.3g}, in {config.model.dtype}, which rounds it once "
            f"more than the learner does: set model.lora.alpha to {2 * lora.rank}, or to another power of two times "
            "model.lora.rank."
        )


def _card(card: Card, gpus: int) -> Iterator[str]:
    plural, each = ("s", ", each") if card.count > 1 else ("", "")
    of = f" of {text(card.size)}" if card.size else ""
    yield f"{card.count} GPU{plural}{of}{each}:" if gpus else "No GPU is asked for; in main memory:"
    for process in card.processes:
        yield f"  {process.kind:<26}{text(process.bytes):>12}"
        for part in process.parts:
            yield f"    {part.name:<24}{text(part.bytes):>12}  {part.detail}"
    if card.left is not None:
        turns = "  keys and values take turns with the update" if card.turns else ""
        yield f"  {'left':<26}{text(card.left):>12}{turns}"


# What checks before a run share: the model's size, and the memory that it needs.


def memory_needs(config: TrainConfig, folder: Path) -> dict[str, Any]:
    """The plan by names. Raises UserInputError for a model that the engine cannot run."""
    check_kernels(config, folder)
    plan = make_plan(config, folder=folder)
    summary = weights_size(plan.parameters, config.model.dtype)
    if config.needed_gpus:
        summary["gpus"] = f"{config.needed_gpus:g} needed, {len(gpu_sizes())} here"
        if config.model.gpu_memory_gib:
            summary["gpu_memory_gib"] = f"{config.model.gpu_memory_gib:g} needed per GPU"
    for sentence in remarks(config):
        logger.warning("%s", sentence)
    first = 0
    for card in plan.cards:  # a line for each process on equal GPUs
        last = first + card.count - 1
        name = "memory" if not plan.gpus else f"GPU {first}" if last == first else f"GPU {first} to {last}"
        for process in card.processes:
            parts = ", ".join(f"{part.name} {part.bytes / GIB:.1f}" for part in process.parts)
            summary[f"{name}, {process.kind}"] = f"{text(process.bytes)} ({parts})"
        if card.left is not None:
            summary[f"{name}, left"] = f"{text(card.left)} of {text(card.size or 0)}"
        first = last + 1
    return summary


def weights_size(parameters: int, dtype: DType) -> dict[str, Any]:
    return {"parameters": amount(parameters), "weights_gib": round(parameters * ELEMENT[dtype] / GIB, 2)}
