"""The GPU checks run at their tiny size on a CPU, in a process that has the packages that the page lists; a check that fails is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# What `docs/benchmarks_gpu.md` lists, with what these need, is all that is installed.
LISTED = """
import re
import sys
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

from packaging.requirements import Requirement

def plain(name):
    return re.sub(r"[-_.]+", "-", name).lower()

needed, wanted = set(), ["torch", "transformers", "peft", "pydantic", "pyyaml", "numpy", "pillow"]
while wanted:
    name = plain(wanted.pop())
    if name not in needed:
        needed.add(name)
        try:
            more = [Requirement(line) for line in requires(name) or ()]
        except PackageNotFoundError:  # of a GPU's torch
            continue
        wanted += [one.name for one in more if one.marker is None or one.marker.evaluate({"extra": ""})]
modules = packages_distributions()
absent = {name for name, of in modules.items() if name != "rl_vlm" and not needed & {plain(one) for one in of}}

class Listed(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in absent else super().find_spec(name, path, target)

assert {"ray", "vllm", "torchvision", "gymnasium"} <= absent
sys.meta_path[:] = [Listed if finder is PathFinder else finder for finder in sys.meta_path]
"""
SCRIPT = """
import json
from pathlib import Path
from unittest import mock

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


whole = pytest.mark.acceptance  # all of it runs once


def run(script: str, *arguments: str) -> str:
    """Run a script beside the checks. What it printed as errors."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks' / 'gpu'}",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, "-c", LISTED + script, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stderr


def test_the_checks_need_what_their_page_lists() -> None:
    run(
        "import correctness, engine, speed; sys.exit(speed.main(['--size', 'tiny']) or engine.main(['--size', 'tiny']))"
    )


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the checks wrote, by name, and what they printed."""
    out = tmp_path_factory.mktemp("gpu")
    printed = run(SCRIPT, str(out))
    found = {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}
    return {**found, "stderr": printed}


@whole
def test_the_learner_is_right_on_a_cpu(ran: dict[str, Any]) -> None:
    figures = ran["correctness"]["figures"]
    assert ran["correctness"]["failed"] == []
    assert all(figure["passed"] for figure in figures.values())
    assert len(figures) == 24
    assert figures["first_ratio_error"]["threshold"] == 0.0 and figures["bf16_rms"]["value"] > 0


@whole
def test_what_is_wrong_is_named(ran: dict[str, Any]) -> None:
    assert ran["broken"]["failed"] == ["backbone_equal_images", "backbone_mixed_images", "undefined", "raises"]
    assert ran["broken"]["figures"]["raises"]["error"] == "ValueError: no such kernel"
    assert "failed: backbone_mixed_images" in ran["stderr"]


@whole
def test_the_engine_agrees_with_the_learner_before_and_after_ten_steps(ran: dict[str, Any]) -> None:
    figures = ran["engine"]["figures"]
    for name in ("gap before", "gap after ten steps"):
        assert 0 < figures[name]["mean_nats"] < 0.05 and figures[name]["token_mult_prob_error"] < 1.05
    assert figures["adapter"]["layers"] == 14 and figures["adapter"]["bytes"] > 100_000
    assert figures["decode 1"]["tokens_per_s"] > 0 and figures["decode beside a learner"]["tokens_per_s"] > 0
