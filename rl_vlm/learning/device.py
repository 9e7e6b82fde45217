"""Where a learner computes, and how much of a GPU that others use too it may take."""

from __future__ import annotations

import torch

from rl_vlm.config import CommonConfig
from rl_vlm.models.memory.cards import driver_gpu, learner_fraction


def learner_device(run: CommonConfig) -> str:
    """The device of a learner in this process: Ray shows an actor its own GPU alone, and a driver all of them.

    In the driver it is one that no replica has been given, unless there is room for both on one.
    """
    if run.learner.gpus_per_learner <= 0 or not torch.cuda.is_available():
        return "cpu"
    return "cuda" if run.learner.num_learners else driver_device(run)


def driver_device(run: CommonConfig) -> str:
    """The device of what computes in the driver beside its learners: their GPU, where they have one."""
    if run.learner.gpus_per_learner <= 0 or not torch.cuda.is_available():
        return "cpu"
    return f"cuda:{min(driver_gpu(run), torch.cuda.device_count() - 1)}"


def give_back(run: CommonConfig) -> None:
    """Free what torch keeps for later updates, where a replica takes turns with this learner on a GPU."""
    if run.serving.vllm.rest_while_learning and learner_device(run) != "cpu":
        torch.cuda.empty_cache()


def limit_memory(run: CommonConfig, device: str) -> None:
    """Keep torch in this process to the learner's share of a GPU that a replica uses too.

    Beyond it an allocation fails here, with a sentence, instead of in the replica.
    """
    if not device.startswith("cuda"):
        return
    index = torch.device(device).index
    number = torch.cuda.current_device() if index is None else index  # torch wants one here
    fraction = learner_fraction(run, torch.cuda.get_device_properties(number).total_memory)
    if fraction is not None:
        torch.cuda.set_per_process_memory_fraction(fraction, number)
