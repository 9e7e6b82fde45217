"""A real Prometheus scrapes a real head on which runs train: every query of the dashboard has data, and every alert fires."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from head import RayHead, wait_until
from prometheus import FOLDER, Prometheus, tool
from runs import ENV_RUNNER, REPLICA, ROOT, TrainingProcess, environment, rl_vlm

from rl_vlm.models.loading import resolve_model

pytestmark = pytest.mark.acceptance

DASHBOARD = json.loads((FOLDER / "grafana_dashboard.json").read_text())
ASYNC, CARTPOLE = ROOT / "configs/async_tiny.yaml", ROOT / "configs/rl_vlm_f/cartpole_tiny.yaml"


def test_promtool_accepts_rules_configuration_and_their_tests() -> None:
    for command in (["check", "rules", "alerts.yml"], ["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]):  # fmt: skip
        done = subprocess.run([tool("promtool"), *command], cwd=FOLDER, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    resolve_model("tiny")
    with RayHead() as started:
        yield started


@pytest.fixture(scope="module")
def prometheus(head: RayHead, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with Prometheus(head, tmp_path_factory.mktemp("prometheus")) as started:
        yield started


def top(head: RayHead, *arguments: str, **changes: str) -> dict[str, Any]:
    done = rl_vlm("top", "--once", "--json", *arguments, **{**head.variables, **changes})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def history(head: RayHead, prometheus: Prometheus, tmp_path_factory: pytest.TempPathFactory) -> Prometheus:
    """A Prometheus that has seen a run whose replicas died twice, and a preference run."""
    folder = tmp_path_factory.mktemp("runs")
    settings = ("algorithm.iterations=40", "evaluation.num_items=64", "evaluation.every=20", "algorithm.max_refill=1")
    with TrainingProcess(folder / "async", *settings, config=ASYNC, **head.variables) as run:
        run.wait_for_iteration(3)
        shown = wait_until(
            lambda: [one for one in top(head)["runs"] if (one["iteration"] or 0) >= 3], "run in the table"
        )
        check_the_table(head, prometheus, shown)
        for k in range(2):
            head.kill(REPLICA)
            run.wait_for_iteration(10 * (k + 1))
            wait_until(lambda: len(head.actors(REPLICA)) == 2, "replica in the place of the dead one")
        assert head.actors(ENV_RUNNER)
        wait_until(
            lambda: prometheus.firing().get("RLVLMReplicasRestarting") == {"async_tiny"}, "alert about replicas", 90
        )
        assert run.wait() == 0, run.output()[-3000:]
    # It has ended and not vanished.
    wait_until(
        lambda: prometheus.query('last_over_time(ray_rl_vlm_run_active{run="async_tiny"}[10m]) == 0'), "end of the run"
    )
    settings = ("preference.total_steps=1500", "preference.labels.source=scripted", "preference.evaluation.every=0")
    with TrainingProcess(folder / "cartpole", *settings, config=CARTPOLE, **head.variables) as run:
        assert run.wait() == 0, run.output()[-3000:]
    return prometheus


def check_the_table(head: RayHead, prometheus: Prometheus, shown: list[dict[str, Any]]) -> None:
    """What `rl-vlm top` says while the run goes on, from the nodes, from Prometheus, and without the token."""
    (run,) = shown
    assert (run["run"], run["algorithm"], run["state"], run["iterations"]) == ("async_tiny", "grpo", "active", 40)
    assert (
        run["max_policy_lag"] == 2 and run["version"] >= 1 and 0 <= run["reward"] <= 1 and "default" in run["accuracy"]
    )
    for found in (top(head), top(head, "--prometheus", prometheus.url)):
        assert [one["run"] for one in found["runs"]] == ["async_tiny"]
        assert len(found["replicas"]) == 2 and all(one["version"] >= 1 for one in found["replicas"])
        (node,) = found["nodes"]
        assert node["memory_total"] > 2**30
    listed = httpx.get(f"{head.url}/api/v0/actors?detail=1", headers=head.headers, timeout=30).text
    for place in range(2):  # what Ray's dashboard shows of an env runner
        assert f"VLMEnvRunner(run=async_tiny, place={place})" in listed
    shown_as_text = rl_vlm("top", "--once", "--address", head.url, **head.variables)
    assert shown_as_text.returncode == 0 and "async_tiny" in shown_as_text.stdout and "replicas" in shown_as_text.stdout
    refused = rl_vlm("top", "--once", "--address", head.url, HOME=str(head.folder / "nowhere"))
    assert refused.returncode == 2 and "RAY_AUTH_TOKEN" in refused.stderr and "Traceback" not in refused.stderr


QUERIES = [
    pytest.param(target["expr"], id=f"{panel['title']} {target['refId']}")
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", [])
]


@pytest.mark.parametrize("expr", QUERIES)
def test_every_query_of_the_dashboard_has_data(history: Prometheus, expr: str) -> None:
    if "gpu" in expr or "gram" in expr:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")
    asked = expr.replace("$run", ".*").replace("$__rate_interval", "30s")
    assert any(math.isfinite(value) for value in history.history(asked)), asked


def test_every_row_of_figures_is_a_metric(history: Prometheus) -> None:
    """All figures of both runs are there, with run, policy and part as tags."""
    names = {
        (series["metric"]["run"], series["metric"]["part"])
        for series in history.query('last_over_time({__name__=~"ray_rl_vlm_.+"}[30m])')
        if series["metric"]["policy"] == "policy"
    }
    parts = {"train", "eval", "rollout", "learner"}
    assert {("async_tiny", part) for part in (*parts, "serving")} <= names
    assert {("cartpole-tiny", part) for part in (*parts, "preference")} <= names


def test_a_run_that_goes_wrong_in_every_way_fires_every_alert(
    history: Prometheus, head: RayHead, tmp_path: Path
) -> None:
    if os.geteuid() or not shutil.which("unshare"):
        pytest.skip("a small disk of one's own needs root")
    mount = f'mount -t tmpfs -o size=1m none {tmp_path} && exec "$@"'
    script = [sys.executable, str(ROOT / "tests/e2e/provoke_alerts.py"), str(tmp_path)]
    command = ["unshare", "-m", "sh", "-c", mount, "sh", *script]  # the mount ends with the process
    run = "goes-wrong"
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(**head.variables)) as process:
        try:
            wanted = {
                "RLVLMRewardCollapsed", "RLVLMMismatchGrows", "RLVLMStalenessAtBound", "RLVLMWorkersRestarting",
                "RLVLMDiskNearlyFull", "RLVLMNoProgress",
            }  # fmt: skip
            seen: dict[str, set[str]] = {"RLVLMNodeDiskNearlyFull": set()}

            def all_have_fired() -> bool:
                assert process.poll() is None
                for name, runs in history.firing().items():
                    seen.setdefault(name, set()).update(runs)
                return {name for name, runs in seen.items() if run in runs} >= wanted

            wait_until(all_have_fired, f"alerts {wanted}", 150)
            assert "" in seen["RLVLMNodeDiskNearlyFull"]
            assert run not in seen.get("RLVLMRunVanished", set())
        finally:
            process.kill()
    wait_until(lambda: run in history.firing().get("RLVLMRunVanished", set()), "alert about the killed run", 90)
    # Runs that ended as they should have not vanished.
    assert history.firing()["RLVLMRunVanished"] == {run}
