"""What a process computes on: its device, the precision of its matrix products, and which library computes them."""

from __future__ import annotations

import os

import torch

from rl_vlm.config import CommonConfig, ServingSection
from rl_vlm.models.memory.placement import driver_gpu, learner_fraction


def choose_precision(dtype: str, device: str) -> None:
    """On a GPU let matrices in float32 be multiplied in TF32, unless the model itself is in float32 (`dtype`).

    These are LoRA's, which vLLM rounds to bfloat16, of fewer digits than TF32, and a critic's head. Learner and engine
    call this, so that both round alike.
    """
    if device.startswith("cuda"):
        # In both cases: an earlier model of this process may have been of the other kind.
        torch.set_float32_matmul_precision("highest" if dtype == "float32" else "high")


def choose_order(device: str) -> None:
    """On a GPU let torch take kernels that add up in one order, so that bytes repeat, or raise."""
    if device.startswith("cuda"):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
        torch.use_deterministic_algorithms(True)
        # Else a pass over memory that is written anyway.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def replica_on_gpu(serving: ServingSection) -> bool:
    """Whether a replica in this process computes on a GPU. One that asks Ray for none must not take one that Ray gives
    to others, though torch may see it."""
    return serving.gpus_per_replica > 0 and torch.cuda.is_available()


# Where a learner computes, and how much of a GPU that others use too it may take.


def learner_device(config: CommonConfig) -> str:
    """The device of a learner in this process: Ray shows an actor its own GPU alone, and a driver all of them."""
    device = driver_device(config)
    return "cuda" if config.learner.num_learners and device != "cpu" else device


def driver_device(config: CommonConfig) -> str:
    """The device of what computes in the driver: the learners' first GPU, where they have one."""
    if config.learner.gpus_per_learner <= 0 or not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{min(driver_gpu(config), torch.cuda.device_count() - 1)}"


def limit_memory(config: CommonConfig, device: str) -> None:
    """Keep torch in this process to the learner's share of a GPU that a replica uses too: an allocation beyond it fails
    here, with a sentence, instead of in the replica."""
    if not device.startswith("cuda"):
        return
    index = torch.device(device).index
    number = torch.cuda.current_device() if index is None else index  # torch wants one here
    fraction = learner_fraction(config, torch.cuda.get_device_properties(number).total_memory)
    if fraction is not None:
        torch.cuda.set_per_process_memory_fraction(fraction, number)
