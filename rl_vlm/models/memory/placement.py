"""Which processes of a run share a GPU, as Ray places them, and how much of one a learner may take."""

from __future__ import annotations

import math

from rl_vlm.config import CommonConfig
from rl_vlm.models.memory.parts import CUDA_CONTEXT


def place(config: CommonConfig) -> list[list[str]]:
    """The kinds of processes on each GPU, as Ray places them on one node: replicas first, each where it first fits."""
    free: list[float] = []
    placed: list[list[str]] = []
    for actors in config.actors:
        kind = actors.kind.split()[0].removesuffix("s")
        for _ in range(actors.count if actors.gpus and kind in ("replica", "teacher", "learner") else 0):
            fitting = [number for number, room in enumerate(free) if room >= actors.gpus - 1e-9]
            if fitting:
                chosen = min(fitting, key=free.__getitem__)  # Ray fills the GPU that is left with least
                free[chosen] -= actors.gpus
                placed[chosen].append(kind)
            else:  # a new GPU, or several
                free += [max(1 - actors.gpus, 0.0)] * math.ceil(actors.gpus)
                placed += [[kind] for _ in range(math.ceil(actors.gpus))]
    return placed


def shares_gpu(config: CommonConfig) -> bool:
    """Whether a replica and a learner are on one GPU."""
    return any(len(set(kinds)) > 1 for kinds in place(config))


def driver_gpu(config: CommonConfig) -> int:
    """The number of the learners' first GPU where Ray gives the replicas the first ones."""
    return next((number for number, kinds in enumerate(place(config)) if "learner" in kinds), 0)


def learner_fraction(config: CommonConfig, card: int) -> float | None:
    """The share of a GPU of `card` bytes that torch may allocate in a learner, CUDA contexts not counted; None: all.

    Beside one replica of vLLM that is all that vLLM leaves; else the share that Ray was asked for.
    """
    share = config.learner.gpus_per_learner
    here = next((kinds for kinds in place(config) if "learner" in kinds), ["learner"])
    # A replica that takes turns with the learner allocates nothing meanwhile.
    if len(here) == 1 or not 0 < share < 1 or config.takes_turns:
        return None
    if sorted(here) == ["learner", "replica"] and config.serving.expected_engine == "vllm":
        share = max(share, 1 - config.serving.memory_utilization)
    return max(share - CUDA_CONTEXT / card, 0.05)
