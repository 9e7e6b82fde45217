"""A private cluster: only the processes that a run needs, a dashboard where one is asked for, and no port for other machines."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from http_support import wait_until

from rl_vlm.config import PolicyConfig
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
@pytest.mark.parametrize("dashboard", [False, True])
def test_a_private_cluster_starts_what_is_needed(dashboard: bool) -> None:
    run = PolicyConfig.model_validate({"resources": {"dashboard": dashboard, "num_cpus": 4}})
    before = set(psutil.Process().children(recursive=True))  # of other tests here, such as a resource tracker
    with ray_cluster(run):
        assert ray.get(ray.remote(lambda: 7).options(num_cpus=0).remote(), timeout=120) == 7
        assert scripts() & OPTIONAL == ({"dashboard.py"} if dashboard else set())
        # What is signalled to the group of this process (`timeout`, a batch system) does not end them before the run is saved.
        started = [process.pid for process in set(psutil.Process().children(recursive=True)) - before]
        assert started and os.getpgrp() not in {os.getpgid(pid) for pid in started if psutil.pid_exists(pid)}
        ports = listening()
        assert {"gcs_server", "raylet"} <= {name for name, _ in ports}
        assert {(name, address) for name, address in ports if not is_loopback(address)} == set()
    wait_until(lambda: not scripts() & OPTIONAL, 30)  # Ray asks the dashboard to end, and does not wait for it
