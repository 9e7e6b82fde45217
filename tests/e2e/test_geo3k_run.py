"""Multi-turn tool use on real geometry problems: the figures of a run are right, recomputed by an independent script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import ROOT, environment, finished

from rl_vlm.models.loading import resolve_model


@pytest.mark.parametrize(
    ("data", "iterations", "items"),
    [
        (str(ROOT / "tests/fixtures/geo3k"), 2, 4),
        pytest.param(os.environ.get("RL_VLM_GEO3K_DATA"), 20, 52, marks=pytest.mark.acceptance, id="all"),
    ],
)
def test_every_figure_of_a_geometry_run_is_right(data: str | None, iterations: int, items: int, tmp_path: Path) -> None:
    if not data:
        pytest.skip("RL_VLM_GEO3K_DATA names no folder with train.parquet and test.parquet")
    arguments = (
        f"env.data={data}",
        f"algorithm.iterations={iterations}",
        "serving.num_replicas=1",
        "rollout.num_env_runners=1",
    )
    run = finished(tmp_path / "run", *arguments, config=ROOT / "configs/geo3k_tiny.yaml")
    assert run.result()["iterations"] == iterations
    script = [sys.executable, str(ROOT / "tests/e2e/recompute.py"), str(run.run_dir), str(resolve_model("tiny"))]
    done = subprocess.run(script, capture_output=True, text=True, timeout=300, env=environment(), check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout)
    assert seen["iterations"] == seen["full_counts"] == iterations
    assert seen["second_turns"] >= 0.5 * seen["trajectories"] and seen["third_turns"] > 0 and seen["tool_calls"] > 0
    for evaluation in map(json.loads, (run.run_dir / "eval.jsonl").read_text().splitlines()):
        assert evaluation["items/default"] == evaluation["items/no_tool"] == items
        assert evaluation["turns/no_tool"] < evaluation["turns/default"]  # without the tool there is little to wait for
