"""What `rl-vlm serve` knows of its replicas: how many there are at the start, and what keys and values they have memory for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_vlm.config import RunConfig, load_config
from rl_vlm.models.memory.parts import ELEMENT, GIB
from rl_vlm.models.memory.shape import ModelShape
from rl_vlm.runs import serve as module
from rl_vlm.runs.kv_memory import depends_on_gpu, kv_room
from rl_vlm.runs.serve_app import HTTPIngress
from rl_vlm.serving.deploy import _replicas
from rl_vlm.serving.service import ServingError
from rl_vlm.types import UserInputError

ON_GPU = ["serving.engine=transformers", "serving.gpus_per_replica=0.5", "serving.num_replicas=2"]
FEWER = ["serving.num_replicas=3", "serving.autoscaling={min_replicas: 1, max_replicas: 2}"]


def run_of(folder: Path, *settings: str) -> RunConfig:
    return load_config(None, [f"model.path={folder}", *settings])


def tokens(folder: Path, run: RunConfig, size: float) -> int:
    return int(size) // ModelShape.read(folder).kv_bytes_per_token(ELEMENT[run.model.dtype])


def test_the_memory_of_a_gpu_is_the_replicas_and_not_this_machines(tiny_folder: Path) -> None:
    run = run_of(tiny_folder, *ON_GPU)
    room = kv_room(run, tiny_folder, gpu_bytes=GIB)
    assert depends_on_gpu(run) and room is not None
    assert room.tokens == pytest.approx(tokens(tiny_folder, run, 2 * 0.4 * 0.5 * GIB), abs=1)  # half a GPU each
    with pytest.raises(UserInputError, match="torch sees no GPU in a replica, .* set http.max_kv_gib"):
        kv_room(run, tiny_folder)
    given = run_of(tiny_folder, *ON_GPU, "http.max_kv_gib=3")
    room = kv_room(given, tiny_folder)
    assert not depends_on_gpu(given) and room is not None and room.tokens == tokens(tiny_folder, given, 6 * GIB)
    assert room.longest(1) == tokens(tiny_folder, given, 3 * GIB) // 64 * 64  # a request is in one of the two replicas
    third = kv_room(given, tiny_folder, servers=3)
    assert third is not None and third.tokens == room.tokens // 3 and third.longest(1) <= room.tokens // 3
    assert not depends_on_gpu(run_of(tiny_folder)) and not depends_on_gpu(run_of(tiny_folder, "serving.engine=vllm"))


def test_the_ingress_asks_a_replica_for_the_memory_of_its_gpu(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RL_VLM_API_TOKEN", "s3cret")

    async def gpu_bytes() -> int:
        return GIB

    async def status() -> dict[str, Any]:
        return {}

    policy = SimpleNamespace(gpu_bytes=SimpleNamespace(remote=gpu_bytes))
    registry = SimpleNamespace(status=SimpleNamespace(remote=status))
    ingress = HTTPIngress.__new__(HTTPIngress)
    run = run_of(tiny_folder, *ON_GPU)
    asyncio.run(ingress.__init__(policy, registry, run, tiny_folder, "name", "id"))  # type: ignore[misc]
    assert ingress._gpu_bytes == GIB


def test_a_replica_that_says_nothing_about_its_gpu_ends_the_command_in_a_sentence() -> None:
    def result(timeout_s: float) -> int:
        raise TimeoutError

    silent = SimpleNamespace(gpu_bytes=SimpleNamespace(remote=lambda: SimpleNamespace(result=result)))
    with pytest.raises(ServingError, match="set http.max_kv_gib"):
        module._gpu_bytes(silent)


def test_the_adapter_is_waited_for_on_the_replicas_that_there_are(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, asked = run_of(tiny_folder, *FEWER), []

    def report(version: int, replicas: int, seconds: float) -> Any:
        asked.append(replicas)
        return SimpleNamespace(acked=["a", "b"])

    monkeypatch.setattr(module.ray, "get", lambda value, timeout: value)
    module._wait_for_adapter(SimpleNamespace(report=SimpleNamespace(remote=report)), run)
    assert asked == [2] == [_replicas(run.serving, None)["autoscaling_config"]["initial_replicas"]]
