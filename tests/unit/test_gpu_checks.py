"""The GPU checks run at their tiny size on a CPU, in a process that has neither Ray nor vLLM; a check that fails is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json
import sys
from pathlib import Path
from unittest import mock

for name in ("ray", "vllm", "torchvision"):
    sys.modules[name] = None  # importing it raises ImportError
import correctness, engine, speed
import numpy as np

out = Path(sys.argv[1])
codes = [check.main(["--size", "tiny", "--out", str(out / f"{check.__name__}.json")]) for check in (correctness, speed, engine)]
assert codes == [0, 0, 0], codes
try:
    correctness.main(["--size", "2b"])  # it would take hours
except SystemExit as end:
    assert "Size 2b needs a GPU" in str(end)
else:
    raise AssertionError("not refused")

# Weights as wide as the tiny model's would make rounding errors grow from layer to layer.
with correctness.scratch("2b") as folder:
    config = json.loads((folder / "config.json").read_text())
    ranges = [config[section]["initializer_range"] for section in ("text_config", "vision_config")]
    assert ranges == [0.02, 0.02], ranges

# What a learner with wrong positions computes must be noticed.
def flat(ids, *_):
    return np.broadcast_to(np.arange(len(ids)), (3, len(ids))).copy()

report = correctness.Report("broken", "tiny", "cpu")
with correctness.scratch("tiny") as folder, mock.patch("rl_vlm.models.families.qwen_vl.mrope_positions", flat):
    bench = correctness.Bench(folder, "tiny", "cpu")
    correctness.check(bench, report, bench.backbone)

def not_a_number():
    yield "undefined", float("nan"), 1.0

def raises():
    raise ValueError("no such kernel")
    yield

correctness.check(bench, report, not_a_number)
correctness.check(bench, report, raises)
assert report.finish(out / "broken.json") == 1
"""


pytestmark = pytest.mark.acceptance  # the whole benchmark runs once


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the checks wrote, by name, and what they printed."""
    out = tmp_path_factory.mktemp("gpu")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks' / 'gpu'}",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(out)], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    found = {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}
    return {**found, "stderr": done.stderr}


def test_the_learner_is_right_on_a_cpu(ran: dict[str, Any]) -> None:
    figures = ran["correctness"]["figures"]
    assert ran["correctness"]["failed"] == []
    assert all(figure["passed"] for figure in figures.values())
    assert len(figures) == 24
    assert figures["first_ratio_error"]["threshold"] == 0.0 and figures["bf16_rms"]["value"] > 0


def test_what_is_wrong_is_named(ran: dict[str, Any]) -> None:
    assert ran["broken"]["failed"] == ["backbone_equal_images", "backbone_mixed_images", "undefined", "raises"]
    assert ran["broken"]["figures"]["raises"]["error"] == "ValueError: no such kernel"
    assert "failed: backbone_mixed_images" in ran["stderr"]


def test_the_engine_agrees_with_the_learner_before_and_after_ten_steps(ran: dict[str, Any]) -> None:
    figures = ran["engine"]["figures"]
    for name in ("gap before", "gap after ten steps"):
        assert 0 < figures[name]["mean_nats"] < 0.05 and figures[name]["token_mult_prob_error"] < 1.05
    assert figures["adapter"]["layers"] == 14 and figures["adapter"]["bytes"] > 100_000
    assert figures["decode 1"]["tokens_per_s"] > 0 and figures["decode beside a learner"]["tokens_per_s"] > 0
