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

CONFIG = ROOT / "configs" / "geo3k_tiny.yaml"
FIXTURES = ROOT / "tests" / "fixtures" / "geo3k"


def run_and_recompute(data: Path, folder: Path, iterations: int) -> tuple[dict[str, int], list[dict[str, float]]]:
    """The recomputed counts and the evaluations of a run."""
    model = resolve_model("tiny")
    arguments = (f"env.data={data}", f"algorithm.iterations={iterations}")
    run = finished(folder, *arguments, config=CONFIG, timeout=900)
    result = run.result()
    assert result["iterations"] == iterations
    script = [sys.executable, str(ROOT / "tests/e2e/recompute.py"), str(folder), str(model)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=300, env=environment(), check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    evaluations = [json.loads(line) for line in (folder / "eval.jsonl").read_text().splitlines()]
    return json.loads(done.stdout), evaluations


def check(seen: dict[str, int], evaluations: list[dict[str, float]], iterations: int, items: int) -> None:
    assert seen["iterations"] == seen["full_counts"] == iterations
    assert seen["second_turns"] >= 0.5 * seen["trajectories"]
    assert seen["third_turns"] > 0
    assert seen["tool_calls"] > 0
    for evaluation in evaluations:
        assert evaluation["items/default"] == evaluation["items/no_tool"] == items
        assert evaluation["turns/no_tool"] < evaluation["turns/default"]  # without the tool there is little to wait for


def test_every_figure_of_a_geometry_run_is_right(tmp_path: Path) -> None:
    seen, evaluations = run_and_recompute(FIXTURES, tmp_path / "run", 3)
    check(seen, evaluations, 3, 4)


@pytest.mark.acceptance
def test_twenty_iterations_on_the_whole_data(tmp_path: Path) -> None:
    data = os.environ.get("RL_VLM_GEO3K_DATA")
    if not data:
        pytest.skip("RL_VLM_GEO3K_DATA names no folder with train.parquet and test.parquet")
    seen, evaluations = run_and_recompute(Path(data), tmp_path / "run", 20)
    check(seen, evaluations, 20, 52)
