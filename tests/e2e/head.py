"""A Ray head of the test's own: free ports, a temporary folder, a token, and metrics every few seconds."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import httpx
import psutil
from runs import environment

REPORT_MS = 3000  # the agent forgets after twice as long; its own figures of the node come every 5 s


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nothing listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    """The first true value of `condition`; an httpx error counts as not yet."""
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if found := condition():
                return found
        assert time.monotonic() < deadline, f"no {what} within {timeout_s:g} s"
        time.sleep(0.2)


class RayHead:
    """`ray start --head` in a process of its own, which ends with this context."""

    def __init__(self, *arguments: str, num_cpus: int = 4, **changes: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rlv-", dir="/tmp"))  # short: sockets lie below it
        port, dashboard, agent, client, metrics = free_ports(5)
        token = self.folder / "token"
        token.write_text(secrets.token_hex(16))
        self.url, self.metrics_url = f"http://127.0.0.1:{dashboard}", f"http://127.0.0.1:{metrics}/metrics"
        # What a process needs that joins this cluster.
        self.variables = {
            "RAY_ADDRESS": f"127.0.0.1:{port}",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_metrics_report_interval_ms": str(REPORT_MS),
            **changes,
        }
        started = {name: value for name, value in self.variables.items() if name != "RAY_ADDRESS"}
        self.log = self.folder / "head.log"
        command = [
            sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats",
            "--node-ip-address=127.0.0.1", f"--port={port}", f"--dashboard-port={dashboard}", f"--num-cpus={num_cpus}",
            f"--dashboard-agent-listen-port={agent}", f"--ray-client-server-port={client}", "--include-dashboard=true",
            f"--metrics-export-port={metrics}", f"--temp-dir={self.folder}", f"--object-store-memory={256 << 20}", *arguments,
        ]  # fmt: skip
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment(**started), start_new_session=True
            )
        try:
            wait_until(lambda: any(one.endswith(f":{metrics}") for one in self.targets()), "metrics endpoint", 90)
        except BaseException:
            self.close()
            raise

    @property
    def headers(self) -> dict[str, str]:
        """What the dashboard asks for."""
        return {"Authorization": f"Bearer {(self.folder / 'token').read_text()}"}

    def targets(self) -> list[str]:
        """The metrics endpoints that the dashboard names."""
        assert self.process.poll() is None, self.log.read_text()
        found = httpx.get(f"{self.url}/api/prometheus/sd", headers=self.headers, timeout=5).raise_for_status().json()
        return [target for group in found for target in group["targets"]]

    def metrics(self) -> str:
        """What the node's metrics agent says now."""
        return httpx.get(self.metrics_url, timeout=10).raise_for_status().text

    def actors(self, title: str) -> list[psutil.Process]:
        """The cluster's processes with this title."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error, IndexError):
                if process.cmdline()[0].startswith(title):
                    found.append(process)
        return found

    def kill(self, title: str) -> None:
        """SIGKILL one actor with this title."""
        self.actors(title)[0].kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the head and everything that it has started."""
        children = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        for process in [*children, psutil.Process(self.process.pid)] if self.process.poll() is None else children:
            with contextlib.suppress(psutil.Error):
                process.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
