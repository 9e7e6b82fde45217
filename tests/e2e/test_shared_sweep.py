"""Trials of a sweep on one set of replicas: none fails, none starts replicas of its own, each learns as well as alone."""

from __future__ import annotations

import csv
import threading
from pathlib import Path

import psutil
import pytest
import yaml
from runs import QUICKSTART, REPLICA, CommandProcess

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(1800)]


def sweep(folder: Path, trials: int, *settings: str) -> tuple[list[dict[str, str]], int]:
    """The rows of a sweep over seeds whose trials share two replicas, and the most replicas that there were at a time."""
    space = folder / "space.yaml"
    space.write_text(
        yaml.safe_dump({"space": {"seed": {"grid": list(range(trials))}}, "max_concurrent": trials, "shared": True})
    )
    command = [
        "sweep", QUICKSTART, "rollout.num_env_runners=1", "resources.num_cpus=64", *settings,
        "--space", space, "--run-dir", folder / "sweep",
    ]  # fmt: skip
    most, ended = 0, threading.Event()
    with CommandProcess(*command) as process:

        def count() -> None:
            nonlocal most
            while not ended.wait(1.0):
                most = max(most, sum(_name(child).startswith(REPLICA) for child in process.remember()))

        watching = threading.Thread(target=count)
        watching.start()
        try:
            code = process.process.wait(timeout=1700)
        finally:
            ended.set()
            watching.join()
        assert code == 0, process.log.read_text()[-3000:]
        assert not [left for left in process.survivors() if _name(left).startswith("ray::")]
    with (folder / "sweep/results.csv").open() as file:
        return list(csv.DictReader(file)), most


def _name(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


@pytest.mark.parametrize("trials", [2, 4, 8])
def test_trials_at_the_same_time_share_the_replicas_and_none_fails(trials: int, tmp_path: Path) -> None:
    rows, replicas = sweep(tmp_path, trials, "algorithm.iterations=3", "evaluation.every=3", "evaluation.num_items=16")
    assert sorted(row["seed"] for row in rows) == [str(seed) for seed in range(trials)]
    assert [(row["finished"], row["iterations"], row["error"]) for row in rows] == [("True", "3", "")] * trials
    assert replicas == 2


def test_trials_that_share_learn_as_well_as_alone(tmp_path: Path) -> None:
    """What test_learning.py asks of a run of its own."""
    rows, replicas = sweep(tmp_path, 2, "evaluation.every=200")
    assert replicas == 2
    for row in rows:
        assert float(row["before"]) <= 0.35
        assert float(row["last"]) >= 0.90
