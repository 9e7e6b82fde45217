"""What replicas have memory for, and how many `rl-vlm serve` waits for at its start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl_vlm.config import load_config
from rl_vlm.models.memory.needs import max_kv_tokens
from rl_vlm.models.memory.shape import GIB, ModelShape
from rl_vlm.runs import serve as module
from rl_vlm.serving.deploy import initial_replicas

FEWER = ["serving.num_replicas=3", "serving.autoscaling={min_replicas: 1, max_replicas: 2}"]


def test_keys_and_values_get_what_a_replica_has_memory_for(tiny_folder: Path) -> None:
    shape = ModelShape.read(tiny_folder)

    def limit(*settings: str, card: int = 0, free: int = 0) -> int:
        return max_kv_tokens(load_config(None, [f"model.path={tiny_folder}", *settings]), shape, card, free)

    each = shape.kv_bytes_per_token(4)
    assert limit(free=10 * GIB) == 8 * GIB // each
    assert limit("serving.max_kv_gib=3", card=GIB, free=10 * GIB) == 3 * GIB // each
    whole, half = (
        limit("serving.engine=transformers", f"serving.gpus_per_replica={gpus}", card=8 * GIB) for gpus in (1, 0.5)
    )
    assert whole < 0.85 * 8 * GIB // each and whole - half == pytest.approx(0.85 * 4 * GIB / each, rel=1e-6)
    assert limit(free=1) == 4096  # one sample


def test_the_adapter_is_waited_for_on_the_replicas_that_there_are(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, asked = load_config(None, [f"model.path={tiny_folder}", *FEWER]), []

    def report(version: int, replicas: int, seconds: float) -> Any:
        asked.append(replicas)
        return SimpleNamespace(acked=["a", "b"])

    monkeypatch.setattr(module.ray, "get", lambda value, timeout: value)
    module._wait_for_adapter(SimpleNamespace(report=SimpleNamespace(remote=report)), run)
    assert asked == [2] == [initial_replicas(run.serving)]
