"""Lets the runs on this machine save their checkpoints before their container is stopped."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import PurePath

import psutil

_COMMANDS = ("train", "sft", "sweep")  # which save a checkpoint on SIGTERM


def is_run(arguments: Sequence[str]) -> bool:
    """Whether a process's arguments are those of `rl-vlm train`, `sft` or `sweep`."""
    for place, argument in enumerate(arguments[:4]):
        if PurePath(argument).name == "rl-vlm" or argument == "rl_vlm.cli":
            return place + 1 < len(arguments) and arguments[place + 1] in _COMMANDS
    return False


def drain_runs(timeout_s: float, within: int | None = None) -> list[int]:
    """Send SIGTERM to this user's runs and wait. Returns the process ids of those that are still there.

    `within`: only processes that descend from this one; None: all of this user.
    """
    found = psutil.Process(within).children(recursive=True) if within is not None else psutil.process_iter()
    runs = []
    for process in found:
        try:
            if process.uids().effective == os.geteuid() and is_run(process.cmdline()):
                process.terminate()
                runs.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    _, left = psutil.wait_procs(runs, timeout=timeout_s)
    return [process.pid for process in left]
