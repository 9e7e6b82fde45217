"""A real Prometheus scrapes a real head on which runs train: every query of the dashboard has data, and every alert fires."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import yaml
from head import RayHead
from jobs import wait_until
from prometheus import FOLDER, Prometheus, tool
from runs import ENV_RUNNER, REPLICA, ROOT, TrainingProcess, environment, rl_vlm

from rl_vlm.models.loading import resolve_model

pytestmark = pytest.mark.acceptance

DASHBOARD = json.loads((FOLDER / "grafana_dashboard.json").read_text())
RULES = yaml.safe_load((FOLDER / "alerts.yml").read_text())
ASYNC, CARTPOLE = ROOT / "configs/async_tiny.yaml", ROOT / "configs/rl_vlm_f/cartpole_tiny.yaml"


def test_promtool_accepts_rules_configuration_and_their_tests() -> None:
    for command in (["check", "rules", "alerts.yml"], ["check", "config", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]):  # fmt: skip
        done = subprocess.run([tool("promtool"), *command], cwd=FOLDER, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    resolve_model("tiny")
    with RayHead(num_cpus=4) as started:
        yield started


@pytest.fixture(scope="module")
def prometheus(head: RayHead, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with Prometheus(head, tmp_path_factory.mktemp("prometheus")) as started:
        yield started


def top(head: RayHead) -> dict[str, Any]:
    done = rl_vlm("top", "--json", "--address", head.dashboard, **head.joining)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@dataclass
class Seen:
    """What was seen while a run went on: `rl-vlm top` for programs and for people, and Ray's list of actors."""

    top: dict[str, Any]
    text: str
    actors: str


@pytest.fixture(scope="module")
def wrong(head: RayHead, tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[bytes]]:
    """A driver whose figures go wrong, on a small disk of its own."""
    assert os.geteuid() == 0 and shutil.which("unshare"), "mounting a small disk needs root"
    folder = tmp_path_factory.mktemp("wrong")
    mount = f'mount -t tmpfs -o size=1m none {folder} && exec "$@"'
    script = [sys.executable, str(ROOT / "tests/e2e/provoke_alerts.py"), str(folder)]
    # In a mount namespace of its own, so that the mount ends with the process.
    with subprocess.Popen(
        ["unshare", "-m", "sh", "-c", mount, "sh", *script], env=environment(**head.joining)
    ) as process:
        yield process
        process.kill()


@pytest.fixture(scope="module")
def runs(
    head: RayHead, prometheus: Prometheus, wrong: subprocess.Popen[bytes], tmp_path_factory: pytest.TempPathFactory
) -> Seen:
    """A run whose replicas die, and a preference run, while Prometheus looks on."""
    folder = tmp_path_factory.mktemp("runs")
    settings = ("algorithm.iterations=160", "evaluation.num_items=64", "evaluation.every=0", "algorithm.max_refill=1")

    def whole() -> dict[str, Any] | None:
        """The table once every process has reported figures of a later iteration."""
        found = top(head)
        rows = {one["run"]: one for one in found["runs"]}
        started = wrong_run in rows and (rows.get(ASYNC.stem, {}).get("version") or 0) >= 1
        return found if started and [one for one in found["replicas"] if one["version"] >= 1][1:] else None

    wrong_run = "goes-wrong"
    with TrainingProcess(folder / "async", *settings, config=ASYNC, **head.joining) as run:
        run.wait_for_iteration(3)
        seen = Seen(
            top=wait_until(whole, "run in the table", 120),
            text=rl_vlm("top", "--once", "--address", head.dashboard, **head.joining).stdout,
            actors=httpx.get(f"{head.dashboard}/api/v0/actors?detail=1", headers=head.headers, timeout=30).text,
        )
        assert head.actors(ENV_RUNNER)
        for replica in head.actors(REPLICA):
            replica.kill()
        wait_until(lambda: ("RLVLMReplicasRestarting", ASYNC.stem) in prometheus.fired(), "alert about replicas", 180)
        assert run.wait() == 0, run.output()[-3000:]
    settings = ("preference.total_steps=1500", "preference.labels.source=scripted", "preference.evaluation.every=0")
    with TrainingProcess(folder / "cartpole", *settings, config=CARTPOLE, **head.joining) as run:
        assert run.wait() == 0, run.output()[-3000:]
    return seen


@pytest.fixture
def history(prometheus: Prometheus, runs: Seen) -> Prometheus:
    """The Prometheus that has seen the runs."""
    return prometheus


def test_top_shows_runs_replicas_and_nodes(runs: Seen) -> None:
    rows = {one["run"]: one for one in runs.top["runs"]}
    assert set(rows) == {ASYNC.stem, "goes-wrong"}
    run = rows[ASYNC.stem]
    assert (run["algorithm"], run["state"], run["iterations"], run["max_policy_lag"]) == ("grpo", "active", 160, 2)
    assert run["iteration"] >= 1 and 0 <= run["reward"] <= 1 and "default" in run["accuracy"]
    assert len(runs.top["replicas"]) == 2 and all(one["run"] == ASYNC.stem for one in runs.top["replicas"])
    (node,) = runs.top["nodes"]
    assert node["memory_total"] > 2**30
    print(runs.text)
    assert ASYNC.stem in runs.text and "replicas" in runs.text and "nodes" in runs.text


def test_top_says_that_it_needs_the_token(head: RayHead) -> None:
    refused = rl_vlm("top", "--once", "--address", head.dashboard, HOME=str(head.folder / "nowhere"))
    assert refused.returncode == 2 and "RAY_AUTH_TOKEN" in refused.stderr and "Traceback" not in refused.stderr


def test_rays_dashboard_names_run_and_place_of_env_runners(runs: Seen) -> None:
    for place in range(2):
        assert f"VLMEnvRunner(run=async_tiny, place={place})" in runs.actors


QUERIES = [
    pytest.param(target["expr"], id=f"{panel['title']} {target['refId']}")
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", [])
]


@pytest.mark.parametrize("expr", QUERIES)
def test_every_query_of_the_dashboard_has_data(history: Prometheus, expr: str) -> None:
    if "ray_node_gpu" in expr or "ray_node_gram" in expr:
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
    history: Prometheus, wrong: subprocess.Popen[bytes]
) -> None:
    run = "goes-wrong"
    wanted = {
        ("RLVLMRewardCollapsed", run), ("RLVLMMismatchGrows", run), ("RLVLMStalenessAtBound", run), ("RLVLMNoProgress", run),
        ("RLVLMWorkersRestarting", run), ("RLVLMDiskNearlyFull", run), ("RLVLMNodeDiskNearlyFull", ""),
    }  # fmt: skip
    wait_until(lambda: history.fired() >= wanted, f"alerts {wanted}", 120)
    assert wrong.poll() is None
    wrong.kill()
    wait_until(lambda: ("RLVLMRunVanished", run) in history.fired(), "alert about the killed run", 120)
    # Runs that ended as they should have not vanished, and nothing was wrong with them.
    # (With windows of seconds a start looks like no progress, waiting for a dead replica like staleness, and the tiny model's learning
    # rate moves the policy far within the lag of two versions.)
    quick = ("RLVLMNoProgress", "RLVLMStalenessAtBound", "RLVLMMismatchGrows")
    others = {(alert, name) for alert, name in history.fired() - wanted if name != run and alert not in quick}
    assert others == {("RLVLMReplicasRestarting", ASYNC.stem)}
    named = {rule["alert"] for group in RULES["groups"] for rule in group["rules"] if "alert" in rule}
    assert named == {alert for alert, _ in history.fired()}
