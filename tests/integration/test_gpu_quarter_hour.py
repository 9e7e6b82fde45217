"""The part of the quarter of an hour that needs vLLM, at its tiny size on a CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.acceptance
@pytest.mark.timeout(900)
def test_vllm_passes_all_checks_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks/gpu/quarter_hour.py", "--size", "tiny", "--part", "3", "--out", out],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=800,
    )
    checks = json.loads(out.read_text())["checks"]
    assert [one["name"] + one["reason"] for one in checks if one["status"] != "ok"] == [], done.stderr[-3000:]
    assert done.returncode == 0 and len(checks) == 9
    figures = {name: figures for one in checks for name, figures in one["figures"].items()}
    assert figures["start"]["kv_tokens"] > 0
    assert figures["reload"]["gap_before_nats"] > figures["reloaded"]["threshold"] > figures["reloaded"]["value"]
    assert len(figures["in flight"]["versions"]) > 1
