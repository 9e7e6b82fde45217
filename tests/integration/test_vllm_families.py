"""vLLM computes what transformers computes for the families that docs/models.md says work on it, adapters included."""

import asyncio
import importlib
from pathlib import Path

import pytest
from real_shapes import build

LIMITS = {"float32": 1e-4, "bfloat16": 0.15}  # nats


@pytest.mark.parametrize(
    ("family", "dtype", "targets"),
    [
        pytest.param("internvl", "float32", "all", marks=pytest.mark.acceptance),
        pytest.param("qwen2_5_vl", "float32", "all", marks=pytest.mark.acceptance),
        pytest.param("idefics3", "float32", "all", marks=pytest.mark.acceptance),
        pytest.param("smolvlm", "float32", "all", marks=pytest.mark.acceptance),
        pytest.param("llava_onevision", "float32", "all", marks=pytest.mark.acceptance),
        pytest.param("mistral3", "float32", "all", marks=pytest.mark.acceptance),
        pytest.param("glm46v", "float32", "attn", marks=pytest.mark.acceptance),
        pytest.param("qwen3_5", "bfloat16", "all", marks=pytest.mark.acceptance),
    ],
)
def test_a_family_on_vllm(
    family: str, dtype: str, targets: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    parity = importlib.import_module("parity")
    bench = parity.Parity(build(family, tmp_path / family), dtype, "vllm", targets)
    try:
        cells = bench.run()
        assert cells["ids"] and max(cells["engine"], cells["adapter"]) < LIMITS[dtype], cells
        assert cells["a blank image changes"] > 2 * LIMITS[dtype], cells
    finally:
        asyncio.run(bench.engine.close())
