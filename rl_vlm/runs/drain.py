"""`rl-vlm cluster drain`: runs save their checkpoints before the containers of driver and actors are stopped."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import psutil

from rl_vlm.runs.signals import RUNNING, STOPPING

_ACTOR = "ray::"  # how the title of a Ray worker's process begins
_IDLE = ("IDLE", "DashboardAgent", "RuntimeEnvAgent", "ProxyActor", "ServeController")  # what does no work of a run
_PAUSE_S = 0.5


def is_actor(arguments: Sequence[str]) -> bool:
    title = arguments[0] if arguments else ""
    return title.startswith(_ACTOR) and not title.removeprefix(_ACTOR).startswith(_IDLE)


def drain_runs(timeout_s: float, within: int | None = None) -> list[int]:
    """Send SIGTERM to this user's runs (`within`: those below this process), and wait. Returns the ids that remain."""
    runs = {process: found["name"] for process, found in _mine(within) if found["name"] in (RUNNING, STOPPING)}
    for process, name in runs.items():
        if name == RUNNING:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
    _, left = psutil.wait_procs(list(runs), timeout=timeout_s)
    return [process.pid for process in left]


def wait_for_actors(timeout_s: float, within: int | None = None) -> list[int]:
    """Wait until no actor works on this machine; actors end with their run. Returns the ids that remain."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = [process.pid for process, found in _mine(within) if is_actor(found["cmdline"] or ())]
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(_PAUSE_S)


def _mine(within: int | None) -> Iterator[tuple[psutil.Process, dict[str, Any]]]:
    processes = psutil.Process(within).children(recursive=True) if within is not None else psutil.process_iter()
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            found = process.as_dict(["name", "uids", "cmdline"])
            if found["uids"] is not None and found["uids"].effective == os.geteuid():
                yield process, found
