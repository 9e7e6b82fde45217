"""What vLLM is told of its memory on a GPU; this machine needs none."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from rl_vlm.config import parse_config
from rl_vlm.engines import vllm_setup
from rl_vlm.models.loading import load_text_side
from rl_vlm.models.memory.needs import kv_cache_bytes
from rl_vlm.models.memory.shape import ModelShape

GIB = 1 << 30


@pytest.mark.parametrize(("share", "sized"), [(0.5, True), (1.0, False)])
def test_keys_and_values_are_sized_on_a_shared_gpu(
    share: float, sized: bool, wide_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = parse_config({"serving": {"gpus_per_replica": share}, "model": {"dtype": "bfloat16"}})
    vllm_setup.prepare_environment(run.serving)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(vllm_setup, "_card_bytes", lambda: int(23.6 * GIB))
    kv_cache = partial(kv_cache_bytes, run, ModelShape.read(wide_folder))
    args = vllm_setup.engine_args(wide_folder, "bfloat16", run.serving, 16, 2, load_text_side(wide_folder), kv_cache)
    assert args.max_num_batched_tokens == 8192
    assert args.gpu_memory_utilization == pytest.approx(0.85 * share)
    assert (args.kv_cache_memory_bytes is not None) == sized
    if sized:
        assert 7 * GIB < args.kv_cache_memory_bytes < 0.425 * 23.6 * GIB
