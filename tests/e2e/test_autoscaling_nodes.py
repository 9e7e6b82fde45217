"""A run on a cluster whose nodes come when replicas and env runners ask for them, and go when nobody does."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray_head import AutoscalingHead
from runs import QUICKSTART

from rl_vlm.models.loading import resolve_model

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(900)]

SMALL = [
    "evaluation.num_items=64",
    "evaluation.every=0",
    "rollout.prompts_per_iteration=4",
    "logging.checkpoint_every=5",
]


@pytest.fixture(scope="module")
def head() -> Iterator[AutoscalingHead]:
    resolve_model("tiny")
    worker = {
        "resources": {"CPU": 1, "object_store_memory": 200_000_000},
        "node_config": {},
        "min_workers": 0,
        "max_workers": 4,
    }
    with AutoscalingHead({"cpu": worker}, max_workers=4, idle_minutes=0.2) as head:
        yield head


def rows(run_dir: Path) -> int:
    try:
        return len((run_dir / "progress.csv").read_text().splitlines()) - 1
    except OSError:
        return 0


def wait_until(
    condition: Callable[[], Any], what: str, head: AutoscalingHead, job: str = "", timeout: float = 300
) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        if job:
            assert head.status(job) in ("PENDING", "RUNNING"), head.logs(job)[-3000:]
        assert time.monotonic() < deadline, f"{what} did not come" + (head.logs(job)[-3000:] if job else "")
        time.sleep(0.5)


def test_nodes_come_one_is_lost_in_mid_run_and_idle_ones_go(head: AutoscalingHead, tmp_path: Path) -> None:
    project, run_dir = tmp_path / "project", tmp_path / "run"
    project.mkdir()
    (project / "config.yaml").write_text(QUICKSTART.read_text())
    assert head.nodes() == []
    # Two replicas of half a CPU and two env runners of a quarter need more than one node of one CPU.
    head.submit(
        "grow", project, ["rl-vlm", "train", "config.yaml", *SMALL, "algorithm.iterations=60", "--run-dir", run_dir]
    )  # fmt: skip
    wait_until(lambda: rows(run_dir) >= 3, "the third iteration", head, "grow")
    came = len(head.nodes())
    assert 2 <= came <= 4
    head.raylets()[0].send_signal(signal.SIGKILL)  # a preempted node
    lost_at = rows(run_dir)
    wait_until(lambda: rows(run_dir) >= lost_at + 10, "ten more iterations", head, "grow")
    assert head.wait_for_end("grow", timeout=600) == "SUCCEEDED", head.logs("grow")[-3000:]
    result = json.loads((run_dir / "result.json").read_text())
    assert result["status"] == "done" and result["iterations"] == rows(run_dir) == 60
    print(
        f"{came} nodes came, one was killed at iteration {lost_at}; restarts {result['restarts']}, dropped {result['dropped']}"
    )
    wait_until(lambda: not head.nodes(), "the end of idle nodes", head)
