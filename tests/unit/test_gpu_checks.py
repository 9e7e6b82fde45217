"""The GPU checks run at their tiny size on a CPU, in a process that has the packages that the page lists; what is wrong is named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "benchmarks" / "gpu"
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
SERVE = """
import io
from pathlib import Path

import quarter_hour

def results(work, bench, names):
    sys.stdin = io.StringIO("".join(f"{bench}.{name}\\n" for name in names))
    quarter_hour.serve(bench, "tiny", work)
"""
WHOLE = """
work = Path(sys.argv[1])
for bench in ("correctness", "speed", "engine"):
    results(work, bench, [name.partition(".")[2] for name, check in quarter_hour.CHECKS.items() if check.bench == bench])

import json
from unittest import mock

import common
import correctness
import numpy as np
from report import Report, SkippedError

try:
    common.prepare(work, "2b")  # it would take hours
except SkippedError as skipped:
    assert "needs a GPU" in str(skipped)
else:
    raise AssertionError("not refused")

# Weights as wide as the tiny model's would make rounding errors grow from layer to layer.
config = json.loads((common.write_folder(work / "wide", "2b") / "config.json").read_text())
ranges = [config[section]["initializer_range"] for section in ("text_config", "vision_config")]
assert ranges == [0.02, 0.02], ranges

# What a learner with wrong positions computes must be noticed.
def flat(ids, *_):
    return np.broadcast_to(np.arange(len(ids)), (3, len(ids))).copy()

bench = correctness.Bench(work / "model-tiny", "tiny", "cpu")
with mock.patch("rl_vlm.models.families.qwen_vl.mrope_positions", flat):
    Report(work / "wrong_positions.json").run(bench.backbone)

def not_a_number():
    yield "undefined", float("nan"), 1.0

Report(work / "not_a_number.json").run(not_a_number)
"""
# A bench that needs no torch, to see what the process above it does.
COMMON = """
def prepare(work, size):
    return work, "cpu"

def free():
    pass
"""
BENCH = """
import os
import time

class Bench:
    made = False

    def __init__(self, folder, size, device):
        pass

    def setup(self):
        self.made = True
        self.report.add("set up", by=os.getpid())

    def fine(self):
        assert self.made
        self.report.add("found", value=1)

    def hangs(self):
        self.report.add("so far", value=2)
        time.sleep(60)

    def dies(self):
        os._exit(3)

    def raises(self):
        raise ValueError("no such kernel")
"""
CHECKED = """
import sys
import quarter_hour
from quarter_hour import Check

quarter_hour._IMPORT_S = 20.0
quarter_hour.ROOT = None
setup = ("bench.setup",)
checks = (Check("bench.setup", "1", 2), *(Check(f"bench.{name}", "1", 2, setup=setup) for name in ("fine", "hangs", "raises", "dies")))
quarter_hour.CHECKS = {one.name: one for one in checks} | {"bench.long": Check("bench.long", "1", 1000)}
given = ["--only", *(f"bench.{name}" for name in ("fine", "hangs", "raises", "dies", "fine", "long")), "--out", "out.json"]
sys.exit(quarter_hour.main(given))
"""


whole = pytest.mark.acceptance  # all of it runs once


def run(script: str, *arguments: str) -> None:
    """Run a script beside the checks."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{GPU}", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", LISTED + SERVE + script, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


def read(folder: Path) -> dict[str, Any]:
    """The reports in a folder, by name."""
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def test_the_checks_need_what_their_page_lists(tmp_path: Path) -> None:
    run("results(Path(sys.argv[1]), 'speed', ['checkpointing']); import correctness, engine", str(tmp_path))
    assert read(tmp_path)["speed.checkpointing"]["status"] == "ok"


def test_a_hang_or_a_crash_costs_its_own_check(tmp_path: Path) -> None:
    for name, text in (("common", COMMON), ("bench", BENCH), ("checked", CHECKED)):
        (tmp_path / f"{name}.py").write_text(text)
    for name in ("quarter_hour.py", "report.py"):
        shutil.copy(GPU / name, tmp_path)
    done = subprocess.run(
        [sys.executable, "checked.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1, done.stderr[-3000:]
    found = json.loads((tmp_path / "out.json").read_text())["checks"]
    assert [(one["name"], one["status"]) for one in found] == [
        ("bench.setup", "ok"),
        ("bench.fine", "ok"),
        ("bench.hangs", "timed out"),
        ("bench.setup", "ok"),  # in a new process
        ("bench.raises", "failed"),
        ("bench.dies", "failed"),
        ("bench.setup", "ok"),
        ("bench.fine", "ok"),
        ("bench.long", "skipped"),
    ]
    assert found[2]["figures"] == {"so far": {"value": 2}} and "killed" in found[2]["reason"]
    assert "no such kernel" in found[4]["reason"] and "code 3" in found[5]["reason"]
    assert "budget" in found[8]["reason"]
    assert len({one["figures"]["set up"]["by"] for one in found if one["name"] == "bench.setup"}) == 3


def test_parts_are_listed() -> None:
    done = subprocess.run([sys.executable, GPU / "quarter_hour.py", "--list"], capture_output=True, text=True)
    seconds = [float(line.split()[1]) for line in done.stdout.splitlines() if line.split()[0] in ("1", "2", "3")]
    assert len(seconds) == 19 and sum(seconds) < 700  # of 15 minutes, which have to start machines as well


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The reports of all checks without vLLM, by name."""
    out = tmp_path_factory.mktemp("gpu")
    run(WHOLE, str(out))
    return read(out)


@whole
def test_learner_and_engine_are_right_on_a_cpu(ran: dict[str, Any]) -> None:
    statuses = {name: one["status"] for name, one in ran.items() if "." in name}
    assert {name for name, status in statuses.items() if status != "ok"} == {"speed.compiled", "speed.cards"}
    assert all("GPU" in ran[name]["reason"] for name, status in statuses.items() if status == "skipped")
    compared = [one for report in ran.values() for one in report["figures"].values() if "threshold" in one]
    assert len(compared) == 24 + 2 + 3  # three that are wrong on purpose


@whole
def test_what_is_wrong_is_named(ran: dict[str, Any]) -> None:
    assert ran["wrong_positions"]["status"] == ran["not_a_number"]["status"] == "failed"
    assert "backbone_equal_images, backbone_mixed_images" in ran["wrong_positions"]["reason"]
    assert "undefined" in ran["not_a_number"]["reason"]


@whole
def test_the_engine_agrees_with_the_learner_before_and_after_ten_steps(ran: dict[str, Any]) -> None:
    for name in ("gap, before", "gap, after ten steps"):
        figures = ran["engine.gap"]["figures"][name]
        assert 0 < figures["mean_nats"] < 0.05 and figures["token_mult_prob_error"] < 1.05
    adapter = ran["engine.adapter"]["figures"]["adapter"]
    assert adapter["layers"] == 14 and adapter["bytes"] > 100_000
    assert ran["engine.decoding"]["figures"]["decode 1, adapter"]["tokens_per_s"] > 0
