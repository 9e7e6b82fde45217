"""What checks before a run share: the model's size, and the memory that it needs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rl_vlm.config import TrainConfig
from rl_vlm.models.loading import DType, from_folder
from rl_vlm.models.memory.parts import amount
from rl_vlm.runs.memory import make_plan, object_store_mib, short_form
from rl_vlm.types import UserInputError

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def memory_needs(config: TrainConfig, folder: Path) -> dict[str, Any]:
    """What the model weighs in the run's precision, and the GPU memory that the recipe states."""
    found = weights_size(count_parameters(folder), config.model.dtype)
    if config.needed_gpus:
        import torch

        here = torch.cuda.device_count()
        found["gpus"] = f"{config.needed_gpus:g} needed, {here} here"
        if config.model.gpu_memory_gib:
            found["gpu_memory_gib"] = f"{config.model.gpu_memory_gib:g} needed per GPU"
    object_store_mib(config)  # raises where it is too small
    return found | short_form(make_plan(config, folder=folder))


def weights_size(parameters: int, dtype: DType) -> dict[str, Any]:
    """What that many parameters weigh, to be printed."""
    return {
        "parameters": amount(parameters),
        "weights_gib": round(parameters * _BYTES[dtype] / 2**30, 2),
    }


def count_parameters(folder: Path) -> int:
    """The parameters of a model folder, from the headers of its safetensors files; without those from its configuration.

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
