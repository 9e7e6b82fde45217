"""A private cluster: only the processes that a run needs, a dashboard where one is asked for, and no port for other machines."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray
from core_support import run_config
from http_support import wait_until
from prometheus_client.samples import Sample

from rl_vlm.config import PolicyConfig
from rl_vlm.monitoring.cluster_metrics import parse
from rl_vlm.monitoring.ray_metrics import MAX_SERIES, RunMetrics
from rl_vlm.runs.ray_session import PrivateNode, ray_cluster
from rl_vlm.runs.surroundings import is_loopback

# Autoscaler, forwarder of logs, API server.
OPTIONAL = {"monitor.py", "log_monitor.py", "dashboard.py"}


def scripts() -> set[str]:
    """File names of the Python scripts that run below this process."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        try:
            found |= {Path(word).name for word in process.cmdline()[1:4] if word.endswith(".py")}
        except psutil.NoSuchProcess:
            continue
    return found


def listening() -> set[tuple[str, str]]:
    """(process, address) of every port that this process and those below it listen on."""
    found = set()
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            ports = process.net_connections(kind="inet")
            found |= {(process.name(), port.laddr.ip) for port in ports if port.status == psutil.CONN_LISTEN}
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.mark.timeout(300)
def test_what_a_start_that_failed_has_started_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    start, starts = PrivateNode.start_raylet, []

    def fails_once(*args: Any, **settings: Any) -> None:
        starts.append(1)
        if len(starts) == 1:
            raise Exception("The current node timed out during startup")  # as Ray says it
        start(*args, **settings)

    monkeypatch.setattr(PrivateNode, "start_raylet", fails_once)
    stores = [name for name, _ in listening()].count("gcs_server")
    with ray_cluster(PolicyConfig.model_validate({"resources": {"num_cpus": 4}})):
        assert len(starts) == 2
        names = [process.name() for process in psutil.Process().children(recursive=True)]
        assert names.count("gcs_server") == stores + 1


@pytest.mark.timeout(300)
def test_ray_puts_one_replica_and_one_learner_of_pairs_on_each_gpu() -> None:
    """On more GPUs than pairs, and again when a replica and all learners have died."""
    run = PolicyConfig.model_validate(
        {
            "resources": {"placement": "pairs"},
            "serving": {"num_replicas": 3, "gpus_per_replica": 0.5},
            "learner": {"num_learners": 3, "gpus_per_learner": 0.5},
        }
    )

    @ray.remote(num_cpus=0)
    class Holder:
        def gpus(self) -> list[str]:
            return [str(one) for one in ray.get_gpu_ids()]

    def start(share: float, count: int) -> dict[Any, str]:
        made = [Holder.options(num_gpus=share).remote() for _ in range(count)]
        return {one: ray.get(one.gpus.remote(), timeout=60)[0] for one in made}

    ray.init(address="local", num_cpus=2, num_gpus=4, include_dashboard=False, log_to_driver=False)
    try:
        of_replica, of_learner = run.gpu_shares
        replicas, learners = start(of_replica, 3), start(of_learner, 3)
        assert sorted(replicas.values()) == sorted(learners.values()) and len(set(replicas.values())) == 3
        dead, _ = replicas.popitem()
        for actor in (dead, *learners):
            ray.kill(actor)
        wait_until(lambda: ray.available_resources().get("GPU", 0) > 4 - 2 * of_replica - 0.01)
        learners = start(of_learner, 3)
        replicas |= start(of_replica, 1)
        assert len(set(replicas.values())) == len(set(learners.values())) == 3
    finally:
        ray.shutdown()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dashboard", [False, pytest.param(True, marks=pytest.mark.acceptance)])
def test_a_private_cluster_starts_what_is_needed(dashboard: bool) -> None:
    run = PolicyConfig.model_validate({"resources": {"dashboard": dashboard, "num_cpus": 4}})
    before = set(psutil.Process().children(recursive=True))  # of other tests here, such as a resource tracker
    with ray_cluster(run):
        # A GPU would be another actor's: one that asks for none sees none.
        seen = ray.remote(lambda: os.environ.get("CUDA_VISIBLE_DEVICES")).options(num_cpus=0)
        assert ray.get(seen.remote(), timeout=120) == ""
        assert scripts() & OPTIONAL == ({"dashboard.py"} if dashboard else set())
        # What is signalled to the group of this process (`timeout`, a batch system) does not end them before the run is saved.
        started = [process.pid for process in set(psutil.Process().children(recursive=True)) - before]
        assert started and os.getpgrp() not in {os.getpgid(pid) for pid in started if psutil.pid_exists(pid)}
        ports = listening()
        assert {"gcs_server", "raylet"} <= {name for name, _ in ports}
        assert {(name, address) for name, address in ports if not is_loopback(address)} == set()
    wait_until(lambda: not scripts() & OPTIONAL, 30)  # Ray asks the dashboard to end, and does not wait for it


# --- Figures of a run reach the metrics page of a node, with their tags; a private cluster has one, too


@pytest.fixture(scope="module")
def cluster(tiny_folder: Path) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_metrics_report_interval_ms", "2000")
        run = run_config(tiny_folder, name="measured", resources__num_cpus=2, rollout__max_policy_lag=2)
        with ray_cluster(run):
            yield run


def page() -> list[Sample]:
    (node,) = ray.nodes()
    text = httpx.get(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics", timeout=10).text
    return [one for one in parse(text) if one.name.startswith("ray_rl_vlm_")]


def until(condition: Any, timeout_s: float = 60.0) -> list[Sample]:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            samples = page()
        except httpx.HTTPError:
            samples = []
        if condition(samples):
            return samples
        assert time.monotonic() < deadline, samples
        time.sleep(0.2)


def value(samples: list[Sample], metric: str, **labels: str) -> float | None:
    found = [s.value for s in samples if s.name == f"ray_rl_vlm_{metric}" and labels.items() <= s.labels.items()]
    assert len(found) <= 1, found
    return found[0] if found else None


@pytest.mark.acceptance
def test_figures_reach_the_metrics_page_with_their_tags(cluster: Any, tmp_path: Path) -> None:
    figures = RunMetrics(cluster, tmp_path, total=50)
    for iteration in range(1, 8):
        figures.add(
            iteration,
            {
                "reward/mean": iteration / 10, "mismatch/kl": 1e-3, "dropped/too_old": 2.0, "time/step": 0.5,
                "policy/kl": float("nan"), "mine/own": 3.0,
            },
            write_errors=4,
        )  # fmt: skip
    figures.add_evaluation({"accuracy/default": 0.75, "evaluation/seconds": 2.0})
    samples = until(lambda found: value(found, "iteration") == 7 and value(found, "accuracy") == 0.75)
    own = {"run": "measured", "policy": "policy"}
    assert value(samples, "reward_mean", **own, part="rollout") == pytest.approx(0.7)
    assert value(samples, "accuracy", **own, part="eval", name="default") == 0.75
    assert value(samples, "evaluation", **own, part="eval", name="seconds") == 2
    assert value(samples, "dropped", **own, part="rollout", name="too_old") == 2
    assert value(samples, "time", **own, part="train", name="step") == 0.5
    assert value(samples, "metric", **own, part="train", name="mine/own") == 3
    assert value(samples, "policy_kl") is None  # nan is no value
    assert value(samples, "run_info", algorithm="grpo", env="Shapes-v0") == 1
    assert [value(samples, name) for name in ("run_active", "iterations", "max_policy_lag", "write_errors")] == [
        1,
        50,
        2,
        4,
    ]
    assert value(samples, "reward_start") == pytest.approx(0.3)
    assert value(samples, "mismatch_growth") == pytest.approx(1)
    assert abs(time.time() - (value(samples, "last_progress_timestamp_seconds") or 0)) < 60
    assert 0 < (value(samples, "disk_free_bytes") or 0) < (value(samples, "disk_total_bytes") or 0)
    # What was set once stays while the process lives: an iteration may take an hour.
    time.sleep(8)  # four of Ray's intervals
    assert value(page(), "reward_mean") == pytest.approx(0.7)
    figures.close()
    until(lambda found: value(found, "run_active") == 0)


@pytest.mark.acceptance
def test_no_run_floods_the_agent(cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    figures = RunMetrics(cluster, tmp_path, total=1)
    for iteration in range(3):
        figures.add(iteration, {f"curriculum/value/{k}": float(k) for k in range(MAX_SERIES + 50)})
    until(lambda found: MAX_SERIES - 20 < sum(s.name == "ray_rl_vlm_curriculum" for s in found) <= MAX_SERIES)
    assert caplog.text.count("are no Ray metrics") == 1
