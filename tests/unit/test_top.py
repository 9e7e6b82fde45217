"""`rl-vlm top`: from metrics pages to rows, tables and JSON; and what it says where there is nothing."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from ports import local_server
from rich.console import Console

from rl_vlm.cli.app import run as rl_vlm
from rl_vlm.monitoring.cluster_metrics import default_dashboard, overview, parse, read_cluster
from rl_vlm.monitoring.top import table

RUN = 'Component="core_worker",NodeAddress="10.0.0.1",WorkerId="w1",policy="policy",run="quick"'
REPLICA = (
    'NodeAddress="10.0.0.2",WorkerId="w2",app="rl-vlm-quick",part="serving",policy="policy",replica="abc",run="quick"'
)
PAGE = f"""\
# HELP ray_rl_vlm_run_active x
# TYPE ray_rl_vlm_run_active gauge
ray_rl_vlm_run_active{{{RUN},part="train"}} 1.0
ray_rl_vlm_run_info{{{RUN},part="train",algorithm="grpo",env="Shapes-v0",model="tiny"}} 1.0
ray_rl_vlm_iteration{{{RUN},part="train"}} 12.0
ray_rl_vlm_iterations{{{RUN},part="train"}} 200.0
ray_rl_vlm_last_progress_timestamp_seconds{{{RUN},part="train"}} 1.0e+09
ray_rl_vlm_reward_mean{{{RUN},part="rollout"}} 0.25
ray_rl_vlm_rollout_tokens_per_s{{{RUN},part="rollout"}} 1234.5
ray_rl_vlm_rollout_lag_max{{{RUN},part="rollout"}} 1.0
ray_rl_vlm_max_policy_lag{{{RUN},part="train"}} 2.0
ray_rl_vlm_mismatch_kl{{{RUN},part="learner"}} NaN
ray_rl_vlm_accuracy{{{RUN},part="eval",name="default"}} 0.5
ray_rl_vlm_accuracy{{{RUN},part="rollout",name="geo"}} 0.9
ray_rl_vlm_dropped{{{RUN},part="rollout",name="too_old"}} 3.0
ray_rl_vlm_dropped{{{RUN},part="rollout",name="runner_died"}} 1.0
ray_rl_vlm_restarts{{{RUN},part="train",name="env_runner"}} 1.0
ray_rl_vlm_adapter_version{{{REPLICA}}} 12.0
ray_rl_vlm_running_samples{{{REPLICA}}} 64.0
ray_rl_vlm_waiting_samples{{{REPLICA}}} 7.0
ray_rl_vlm_generated_tokens_total{{{REPLICA}}} 1000.0
ray_rl_vlm_requests_total{{NodeAddress="10.0.0.2",WorkerId="w0",replica="dead",run="quick",part="serving"}} 5.0
ray_node_cpu_utilization{{ip="10.0.0.2"}} 45.0
ray_node_mem_used{{ip="10.0.0.2"}} 8589934592
ray_node_mem_total{{ip="10.0.0.2"}} 17179869184
ray_node_gpus_utilization{{ip="10.0.0.2",GpuIndex="0",GpuDeviceName="H200"}} 80.0
ray_node_gram_used{{ip="10.0.0.2",GpuIndex="0",GpuDeviceName="H200"}} 1024.0
ray_node_gram_available{{ip="10.0.0.2",GpuIndex="0",GpuDeviceName="H200"}} 3072.0
ray_tasks{{State="RUNNING"}} 4.0
"""


def test_rows_of_runs_replicas_and_nodes() -> None:
    found = overview(parse(PAGE), now=1e9 + 30)
    (run,), (replica,), (node,) = found.values()
    assert (run["run"], run["algorithm"], run["env"], run["state"]) == ("quick", "grpo", "Shapes-v0", "active")
    assert (run["iteration"], run["iterations"], run["reward"], run["idle_seconds"]) == (12, 200, 0.25, 30)
    assert run["mismatch_kl"] is None and run["steps_per_s"] is None
    assert run["accuracy"] == {"default": 0.5} and run["restarts"] == {"env_runner": 1}
    assert run["dropped"] == {"too_old": 3, "runner_died": 1}
    # A dead replica is known by its counters alone.
    assert (replica["replica"], replica["version"], replica["running"], replica["waiting"]) == ("abc", 12, 64, 7)
    assert replica["node"] == "10.0.0.2" and replica["requests"] is None
    assert (node["node"], node["cpu_percent"], node["memory_used"]) == ("10.0.0.2", 45, 2**33)
    assert node["gpus"] == [
        {"gpu": "0", "name": "H200", "percent": 80, "memory_used": 2**30, "memory_free": 3 * 2**30}
    ]  # fmt: skip


def test_a_shared_replica_is_shown_with_the_runs_that_use_it() -> None:
    """Its figures have the tag of the run that started it, which may have ended; one policy of its own is an ordinary replica's."""
    alone = parse(PAGE + f"ray_rl_vlm_policy_version{{{REPLICA}}} 12.0\n")
    assert [row["runs"] for row in overview(alone, now=1e9)["replicas"]] == [["quick"]]
    users = [REPLICA.replace('policy="policy"', f'policy="{name}"') for name in ("b-lr1-0a1b2c3d", "a-9f8e7d6c")]
    page = PAGE + "".join(f"ray_rl_vlm_policy_version{{{labels}}} 3.0\n" for labels in users)
    found = overview(parse(page), now=1e9)
    assert [(row["run"], row["runs"]) for row in found["replicas"]] == [("quick", ["a", "b-lr1"])]
    assert "a, b-lr1" in text(table(found))


def text(found: object, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(found)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_table_says_what_matters() -> None:
    shown = text(table({**overview(parse(PAGE), 1e9 + 90), "unreachable": ["10.0.0.3:8080"]}))
    parts = ["quick", "grpo", "1m 30s ago", "12/200", "0.25", "1/2", "abc", "45 %", "8.0/16 GiB", "80 %", "1.0/4 GiB"]
    assert [part for part in [*parts, "1,234 tok/s"] if part not in shown] == []
    assert "No answer from 10.0.0.3:8080" in shown
    assert "No run reports metrics here" in text(table(overview([], 0.0)))
    hostile = PAGE.replace('run="quick"', 'run="[red]x[/red]"')
    assert "[red]x[/red]" in text(table(overview(parse(hostile), 1e9)))


@contextmanager
def served() -> Iterator[str]:
    """A dashboard and a node at one port."""

    def reply(path: str, headers: Any, _: bytes) -> tuple[int, Any]:
        asked = urlsplit(path)
        if asked.path == "/api/prometheus/sd":
            if headers["Authorization"] != "Bearer secret":
                return 401, "no"
            return 200, [{"labels": {}, "targets": [headers["Host"], "127.0.0.1:9"]}]
        if asked.path == "/metrics":
            assert headers["Authorization"] is None  # the token is for the dashboard alone
            return 200, PAGE
        return 200, "<html>"

    with local_server(reply) as url:
        yield url


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


@pytest.mark.parametrize("where", ["variable", "file", "home"])
def test_the_token_is_found_where_ray_finds_it(where: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if where == "variable":
        monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    else:
        path = tmp_path / ("token" if where == "file" else ".ray/auth_token")
        path.parent.mkdir(exist_ok=True)
        path.write_text("secret\n")
        if where == "file":
            monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    with served() as url:
        samples, missing = read_cluster(url)
    assert len(samples) == len(parse(PAGE)) and missing == ["127.0.0.1:9"]


def test_the_command_prints_tables_or_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # reaches none of a cluster's machines
    with served() as url:
        assert rl_vlm(["top", "--json", "--address", url]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["runs"][0]["run"] == "quick" and found["replicas"][0]["running"] == 64
        assert found["unreachable"] == ["127.0.0.1:9"]
        monkeypatch.setenv("RAY_ADDRESS", url)
        assert default_dashboard() == url
        assert rl_vlm(["top", "--once"]) == 0
        assert "quick" in capsys.readouterr().out


def test_one_clear_sentence_where_nothing_is(capsys: pytest.CaptureFixture[str]) -> None:
    with served() as url:
        answers = {"http://127.0.0.1:9": "--address", url: "RAY_AUTH_TOKEN", f"{url}/elsewhere": "right address"}
        for address, says in answers.items():
            assert rl_vlm(["top", "--once", "--address", address]) == 2
            error = capsys.readouterr().err
            assert says in error and "Traceback" not in error and error.count("\n") == 1
