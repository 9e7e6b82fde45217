"""How much memory the replicas of `rl-vlm serve` have for keys and values, and what that lets in."""

from __future__ import annotations

from pathlib import Path

import psutil

from rl_vlm.config import RunConfig
from rl_vlm.http.kv_room import KVRoom
from rl_vlm.models.memory.parts import ELEMENT, GIB
from rl_vlm.models.memory.shape import ModelShape
from rl_vlm.serving.deploy import initial_replicas
from rl_vlm.types import UserInputError

ANSWER_S = 30.0  # how long a replica that runs may take to say how much memory its GPU has
_CONTEXTS = 64  # full ones, whose keys and values a replica has memory for by default
_KV_SHARE = 0.8  # of a machine's free memory, for keys and values; of a GPU's whole memory, which holds the weights too, half of it


def depends_on_gpu(run: RunConfig) -> bool:
    """Whether `kv_room` must know the memory of a replica's GPU, which is not one of this process."""
    serving = run.serving
    return serving.expected_engine != "vllm" and run.http.max_kv_gib is None and serving.gpus_per_replica > 0


def kv_room(run: RunConfig, model: Path, gpu_bytes: int = 0, servers: int = 1) -> KVRoom | None:
    """What bounds the requests in the engines of all replicas; None where vLLM does.

    gpu_bytes: the memory of a replica's GPU, 0 where none is seen. servers: processes that let requests in, each its part.
    Raises UserInputError where that memory matters and is unknown.
    """
    serving, given = run.serving, run.http.max_kv_gib
    if serving.expected_engine == "vllm":
        return None
    replicas = initial_replicas(serving)
    token = ModelShape.read(model).kv_bytes_per_token(ELEMENT[run.model.dtype])
    wanted = max(GIB, _CONTEXTS * serving.max_context * token)
    if given is not None:
        total = int(given * GIB) * replicas
    elif serving.gpus_per_replica > 0:
        if not gpu_bytes:
            raise UserInputError(
                f"serving.gpus_per_replica is {serving.gpus_per_replica:g} and torch sees no GPU in a replica, so nobody knows how much "
                "memory keys and values have: install torch with CUDA there, or set http.max_kv_gib."
            )
        total = min(int(_KV_SHARE / 2 * gpu_bytes * min(serving.gpus_per_replica, 1)), wanted) * replicas
    else:
        # Replicas without GPUs share the memory of their machine, which is taken for this one.
        total = min(int(_KV_SHARE * psutil.virtual_memory().available), wanted * replicas)
    rows = max(serving.max_rows * replicas // servers, 1)
    return KVRoom(total // token // servers, rows, largest=total // token // replicas)
