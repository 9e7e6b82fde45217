"""Using a Ray cluster with token authentication as its users do: `ray job`, and the dashboard over HTTP."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

RAY = Path(sys.executable).with_name("ray")


def wait_until(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    """The first true value of `condition`; an httpx error counts as not yet."""
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if found := condition():
                return found
        assert time.monotonic() < deadline, f"no {what} within {timeout_s:g} s"
        time.sleep(0.2)


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

    def wait_until(self, condition: Callable[[], Any], job: str, timeout: float = 300) -> None:
        """Wait for something while a job runs."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert self.status(job) in ("PENDING", "RUNNING"), self.logs(job)[-3000:]
            assert time.monotonic() < deadline, self.logs(job)[-3000:]
            time.sleep(0.3)
