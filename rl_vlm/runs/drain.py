"""Lets runs save their checkpoints before the containers of their driver, and of their actors, are stopped."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

import psutil

_COMMANDS = ("train", "sft", "sweep")  # which save a checkpoint on SIGTERM
_ACTOR = "ray::"  # how the title of a Ray worker's process begins
_IDLE = ("IDLE", "DashboardAgent", "RuntimeEnvAgent", "ProxyActor", "ServeController")  # what does no work of a run
_PAUSE_S = 0.5
# What a run calls itself in the system's table of processes (15 characters at most): a script's arguments do not tell that it is one, and
# one that saves its checkpoint already must not be told twice, which ends it at once.
RUNNING, STOPPING = "rl-vlm:run", "rl-vlm:stopping"


def call_this_process(name: str) -> str:
    """Name this process; returns its name before, or an empty string where the system has no such names."""
    own = Path("/proc/self/comm")
    try:
        before = own.read_text().strip()
        own.write_text(name)
    except OSError:
        return ""
    return before


def is_run(arguments: Sequence[str]) -> bool:
    """Whether a process's arguments are those of `rl-vlm train`, `sft` or `sweep`."""
    for place, argument in enumerate(arguments[:4]):
        if PurePath(argument).name == "rl-vlm" or argument == "rl_vlm.cli":
            return place + 1 < len(arguments) and arguments[place + 1] in _COMMANDS
    return False


def is_actor(arguments: Sequence[str]) -> bool:
    """Whether a process's arguments are the title of an actor or task of a run."""
    title = arguments[0] if arguments else ""
    return title.startswith(_ACTOR) and not title.removeprefix(_ACTOR).startswith(_IDLE)


def drain_runs(timeout_s: float, within: int | None = None) -> list[int]:
    """Send SIGTERM to this user's runs, but those that stop already, and wait. Returns the process ids of those that are still there.

    `within`: only processes that descend from this one; None: all of this user.
    """
    runs = [
        process for process, arguments in _mine(within) if is_run(arguments) or _name(process) in (RUNNING, STOPPING)
    ]
    for process in runs:
        try:
            if process.name() != STOPPING:
                process.terminate()
        except psutil.NoSuchProcess:
            continue
    _, left = psutil.wait_procs(runs, timeout=timeout_s)
    return [process.pid for process in left]


def wait_for_actors(timeout_s: float, within: int | None = None) -> list[int]:
    """Wait until no actor works on this machine; they end with their run. Returns the process ids of those that still do."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = [process.pid for process, arguments in _mine(within) if is_actor(arguments)]
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(_PAUSE_S)


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""


def _mine(within: int | None) -> Iterator[tuple[psutil.Process, list[str]]]:
    """This user's processes and their arguments."""
    found = psutil.Process(within).children(recursive=True) if within is not None else psutil.process_iter()
    for process in found:
        try:
            if process.uids().effective == os.geteuid():
                yield process, process.cmdline()
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
