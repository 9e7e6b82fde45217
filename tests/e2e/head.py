"""A Ray head of a test's own on this machine: private folder and ports, a token, and metrics every few seconds."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Self

import psutil
from jobs import RAY, JobClient, wait_until
from ports import free_ports
from runs import environment

REPORT_MS = 3000  # the agent forgets after twice as long; its own figures of the node come every 5 s
_STARTS = 3  # Ray gives its own processes 30 s to come up, which a busy machine may not keep


class RayHead(JobClient):
    """`ray start --head --block`. Everything that it started ends with the context."""

    def __init__(self, *arguments: str, num_cpus: int = 8, **changes: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rlv-", dir="/tmp"))  # short: sockets lie below it
        self.token = secrets.token_hex(32)
        (self.folder / "token").write_text(self.token)
        self.log = self.folder / "head.log"
        self._arguments, self._num_cpus, self._changes = arguments, num_cpus, changes
        self.everyone: dict[int, psutil.Process] = {}

    @property
    def joining(self) -> dict[str, str]:
        """What a process needs that joins this cluster."""
        return {
            "RAY_ADDRESS": self.address,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "token"),
            "RAY_metrics_report_interval_ms": str(REPORT_MS),
            **self._changes,
        }

    @property
    def variables(self) -> dict[str, str]:
        """The environment of whoever may use the cluster."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return environment(**{"RAY_API_SERVER_ADDRESS": self.dashboard, "PATH": path, **self.joining})

    def __enter__(self) -> Self:
        for attempt in range(_STARTS):
            try:
                self._start()
                return self
            except AssertionError:
                self._stop()
                if attempt == _STARTS - 1:
                    raise
        raise AssertionError

    def _start(self) -> None:
        gcs, dashboard, agent_http, agent_grpc, client, metrics, env_agent = free_ports(7)
        self.address, self.dashboard = f"127.0.0.1:{gcs}", f"http://127.0.0.1:{dashboard}"
        variables = {name: value for name, value in self.variables.items() if name != "RAY_ADDRESS"}
        command = [
            RAY, "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={gcs}", f"--temp-dir={self.folder}/ray",
            "--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}",
            f"--dashboard-agent-listen-port={agent_http}", f"--dashboard-agent-grpc-port={agent_grpc}",
            f"--ray-client-server-port={client}", f"--metrics-export-port={metrics}", f"--runtime-env-agent-port={env_agent}",
            f"--num-cpus={self._num_cpus}", "--object-store-memory=400000000", "--disable-usage-stats", *self._arguments,
        ]  # fmt: skip
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                list(map(str, command)), stdout=log, stderr=subprocess.STDOUT, env=variables, start_new_session=True
            )
        wait_until(lambda: any(one.endswith(f":{metrics}") for one in self.targets()), "metrics endpoint", 120)

    @property
    def headers(self) -> dict[str, str]:
        """What the dashboard asks for."""
        return {"Authorization": f"Bearer {self.token}"}

    def targets(self) -> list[str]:
        """The metrics endpoints that the dashboard names."""
        self.remember()
        assert self.process.poll() is None, self.log.read_text()[-2000:]
        found = self.get("/api/prometheus/sd").raise_for_status().json()
        return [target for group in found for target in group["targets"]]

    def remember(self) -> None:
        """Note the processes below the head, to end them by their ids."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.everyone.update({one.pid: one for one in psutil.Process(self.process.pid).children(recursive=True)})

    def actors(self, title: str) -> list[psutil.Process]:
        """The cluster's processes with this title, of killed drivers too."""
        self.remember()
        found = []
        for process in self.everyone.values():
            with contextlib.suppress(psutil.Error, IndexError):
                if process.is_running() and process.cmdline()[0].startswith(title):
                    found.append(process)
        return found

    def _stop(self) -> None:
        self.remember()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(30)
        for process in psutil.wait_procs(list(self.everyone.values()), timeout=10)[1]:
            process.kill()

    def __exit__(self, *_: object) -> None:
        self._stop()
        shutil.rmtree(self.folder, ignore_errors=True)
