"""A Ray head of its own for a test: private folder and ports, token authentication, jobs through `ray job`."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
from runs import environment

RAY = Path(sys.executable).with_name("ray")
_STARTS = 3


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class JobClient:
    """Uses the job API of a cluster with token authentication."""

    dashboard: str
    token: str

    @property
    def variables(self) -> dict[str, str]:
        """The environment of whoever may use the cluster."""
        raise NotImplementedError

    def remember(self) -> None:
        """Note the processes of the cluster, to end them by their ids."""
        raise NotImplementedError

    def get(self, path: str, token: str | None = "") -> httpx.Response:
        """An answer of the dashboard; `token` None: without one, empty: with the right one."""
        headers = {} if token is None else {"Authorization": f"Bearer {token or self.token}"}
        return httpx.get(f"{self.dashboard}{path}", headers=headers, timeout=30)

    def job(self, *arguments: object, timeout: float = 120, **changes: str) -> subprocess.CompletedProcess[str]:
        """`ray job ...` to its end."""
        command = [RAY, "job", *arguments]
        return subprocess.run(
            list(map(str, command)),
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**self.variables, **changes},
            check=False,
        )

    def submit(
        self,
        name: str,
        working_dir: Path,
        entrypoint: Sequence[object],
        *,
        options: Sequence[str] = (),
        **variables: str,
    ) -> None:
        """Submit a job and come back at once."""
        environment = {"env_vars": variables}
        deadline = time.monotonic() + 90
        while True:
            done = self.job(
                "submit", "--no-wait", "--submission-id", name, "--working-dir", working_dir, "--runtime-env-json",
                json.dumps(environment), *options, "--", *entrypoint,
            )  # fmt: skip
            # A head takes jobs only when its agent has come up.
            if "No available agent" not in done.stderr or time.monotonic() > deadline:
                break
        assert done.returncode == 0, done.stderr[-2000:] + done.stdout[-2000:]

    def status(self, name: str) -> str:
        """PENDING, RUNNING, SUCCEEDED, STOPPED or FAILED."""
        self.remember()
        found: dict[str, Any] = self.get(f"/api/jobs/{name}").json()
        return str(found["status"])

    def logs(self, name: str) -> str:
        """What the job has printed."""
        return str(self.get(f"/api/jobs/{name}/logs").json()["logs"])

    def wait_for_end(self, name: str, timeout: float = 300) -> str:
        """The job's last status."""
        deadline = time.monotonic() + timeout
        while (status := self.status(name)) in ("PENDING", "RUNNING"):
            assert time.monotonic() < deadline, f"{name} did not end:\n{self.logs(name)[-3000:]}"
            time.sleep(0.5)
        return status


class RayHead(JobClient):
    """`ray start --head --block` on this machine. Everything that it started ends with the context."""

    def __init__(self, num_cpus: int = 8, **changes: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rlh-"))  # short: sockets lie below it
        self.token = secrets.token_hex(32)
        (self.folder / "token").write_text(self.token)
        self.num_cpus, self.changes = num_cpus, changes
        self.everyone: dict[int, psutil.Process] = {}

    @property
    def variables(self) -> dict[str, str]:
        """The environment of whoever may use the cluster."""
        return environment(
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN_PATH=str(self.folder / "token"),
            RAY_ADDRESS=self.address,
            RAY_API_SERVER_ADDRESS=self.dashboard,
            PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            **self.changes,
        )

    def __enter__(self) -> Self:
        for attempt in range(_STARTS):
            try:
                self._start()
                return self
            except (TimeoutError, subprocess.CalledProcessError):
                self._stop()
                if attempt == _STARTS - 1:
                    raise
        raise AssertionError

    def _start(self) -> None:
        gcs, dashboard, agent_http, agent_grpc, client, metrics, env_agent = free_ports(7)
        self.address, self.dashboard = f"127.0.0.1:{gcs}", f"http://127.0.0.1:{dashboard}"
        variables = {name: value for name, value in self.variables.items() if name not in ("RAY_ADDRESS",)}
        command = [
            RAY, "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={gcs}", f"--temp-dir={self.folder}/ray",
            "--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}",
            f"--dashboard-agent-listen-port={agent_http}", f"--dashboard-agent-grpc-port={agent_grpc}",
            f"--ray-client-server-port={client}", f"--metrics-export-port={metrics}", f"--runtime-env-agent-port={env_agent}",
            f"--num-cpus={self.num_cpus}", "--object-store-memory=400000000", "--disable-usage-stats",
        ]  # fmt: skip
        self.log = self.folder / "head.log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                list(map(str, command)), stdout=log, stderr=subprocess.STDOUT, env=variables, start_new_session=True
            )
        deadline = time.monotonic() + 120
        while True:
            self.remember()
            if self.process.poll() is not None:
                raise subprocess.CalledProcessError(self.process.returncode, "ray start", self.log.read_text()[-2000:])
            try:
                # Ray gives its own processes 30 s, which a busy machine may not keep.
                if "Local node IP" in self.log.read_text() and self.get("/api/version").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            if time.monotonic() > deadline:
                raise TimeoutError(self.log.read_text()[-2000:])
            time.sleep(0.3)

    def remember(self) -> None:
        """Note the processes below the head, to end them by their ids."""
        try:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                self.everyone[process.pid] = process
        except psutil.NoSuchProcess:
            pass

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
