"""Sampling and learning at the same time, group by group, while things die."""

from __future__ import annotations

import csv
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from runs import ENV_RUNNER, REPLICA, ROOT, TrainingProcess

from rl_vlm.models.loading import resolve_model

ASYNC = ROOT / "configs" / "async_tiny.yaml"


@pytest.fixture(autouse=True, scope="module")
def _tiny() -> None:
    resolve_model("tiny")


@pytest.mark.acceptance
def test_no_group_is_too_old_or_missing_when_a_runner_and_a_replica_die(tmp_path: Path) -> None:
    short = ("algorithm.iterations=50", "evaluation.num_items=64", "evaluation.every=25")
    with TrainingProcess(tmp_path / "run", *short, config=ASYNC) as run:
        run.wait_for_iteration(12)
        run.kill(ENV_RUNNER)
        run.wait_for_iteration(run.iterations() + 6)
        run.kill(REPLICA)
        assert run.wait() == 0, run.output()[-3000:]
        assert run.survivors() == []
    result = run.result()
    assert (result["status"], result["iterations"], result["trajectories"]) == ("done", 50, 50 * 16 * 8)
    assert result["restarts"]["env_runner"] == result["dropped"]["runner_died"] == 1
    assert not {"too_old", "group_lost"} & result["dropped"].keys()
    with open(run.run_dir / "progress.csv") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 50
    lags = [float(row["rollout/lag_max"]) for row in rows]
    assert max(lags) <= 2 and max(lags[3:]) >= 1  # groups of older versions are learned from, and none is too old


@pytest.mark.acceptance
@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_turns_go_on_with_newer_weights(tmp_path: Path, mode: str) -> None:
    arguments = (
        f"rollout.in_flight_updates={mode}",
        "algorithm.iterations=20",
        "evaluation.num_items=64",
        "logging.trajectories_every=1",
        "logging.trajectories_per_dump=128",
    )
    with TrainingProcess(tmp_path / "run", *arguments, config=ASYNC) as run:
        assert run.wait() == 0, run.output()[-3000:]
    assert run.result()["trajectories"] == 20 * 16 * 8
    rows = [
        row
        for path in sorted((run.run_dir / "trajectories").glob("*.parquet"))
        for row in pq.read_table(path).to_pylist()
    ]
    mixed = [turn for row in rows for turn in row["turns"] if turn["pieces"]]
    assert mixed
    for turn in mixed:
        counts, versions = zip(*turn["pieces"], strict=True)
        assert sum(counts) == turn["stop"] - turn["start"] and min(counts) > 0
        assert list(versions) == sorted(set(versions)) and turn["policy_version"] == versions[0]


@pytest.mark.acceptance
def test_what_was_under_way_is_resumed(tmp_path: Path) -> None:
    arguments = ("algorithm.iterations=20", "evaluation.num_items=64", "logging.checkpoint_every=5")
    with TrainingProcess(tmp_path / "run", *arguments, config=ASYNC) as run:
        run.wait_for_iteration(12)
        run.process.kill()
        run.process.wait()
        run.survivors(grace=60)
    with TrainingProcess(tmp_path / "run", *arguments, "--resume", config=ASYNC) as run:
        assert run.wait() == 0, run.output()[-3000:]
    assert "Resumed from iteration 10" in run.output()
    assert run.result()["trajectories"] == 20 * 16 * 8


@pytest.mark.acceptance
def test_it_reaches_the_accuracy_of_the_quickstart(tmp_path: Path) -> None:
    with TrainingProcess(tmp_path / "run", config=ASYNC) as run:
        assert run.wait() == 0, run.output()[-3000:]
    result = run.result()
    assert result["accuracy_after"] >= 0.90
    assert "too_old" not in result["dropped"]
