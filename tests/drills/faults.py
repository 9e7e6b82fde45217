"""What a drill does to a running cluster: kill or stop a part, cut or slow a link, fill /dev/shm or the disk of the run."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from node_cluster import Node, NodeCluster
from runs import ENV_RUNNER, LEARNER, REGISTRY, REPLICA

STOPPED_S = 60.0
_FIND_S = 120.0
CUT_S, FULL_S, SLOW_S = 20.0, 20.0, 20.0
SLOW = (0.1, 0.05)  # seconds longer each way, and the share of frames that is lost each way

# Part -> how its processes' command lines begin.
PARTS = {
    "replica": REPLICA,
    "env runner": ENV_RUNNER,
    "registry": REGISTRY,
    "learner": LEARNER,
    "serve controller": "ray::ServeController",
}
PLACES = ("driver", "raylet", "node", "head")
FAULTS = ("killed", "stopped", "shm full", "disk full", "cut", "slow")


def find(cluster: NodeCluster, part: str, run_dir: Path) -> tuple[Node, list[psutil.Process]]:
    """The node of a part and its processes there, the first of several such parts; waited for, as it may just restart.

    Raises LookupError.
    """
    deadline = time.monotonic() + _FIND_S
    while (found := _find(cluster, part, run_dir)) is None:
        if time.monotonic() > deadline:
            raise LookupError(f"no {part} is running")
        time.sleep(0.5)
    return found


def _find(cluster: NodeCluster, part: str, run_dir: Path) -> tuple[Node, list[psutil.Process]] | None:
    if part == "head":  # the GCS and the dashboard, and Serve's controller
        return cluster.head, cluster.head.processes()
    for node in cluster.nodes:
        if part in PARTS:
            found = node.processes(PARTS[part])
        elif part == "driver":
            found = [process for process in node.processes() if _is_driver(process, run_dir)]
        else:  # of a worker that works, and is not the driver's
            found = [process for process in node.processes() if "raylet/raylet" in " ".join(process.cmdline()[:1])]
            if not node.processes(REPLICA) or node.processes(REGISTRY):
                found = []
        if found:
            return node, found[:1]
    return None


def _is_driver(process: psutil.Process, run_dir: Path) -> bool:
    line = process.cmdline()
    return str(run_dir) in line and "python" in Path(line[0]).name


def inject(cluster: NodeCluster, part: str, fault: str, run_dir: Path) -> Callable[[], None]:
    """Do it, and return what ends it again."""
    node, processes = find(cluster, part, run_dir)
    if fault == "killed":
        if part in ("node", "head"):
            node.kill()
        for process in processes if part not in ("node", "head") else []:
            process.send_signal(signal.SIGKILL)
        return lambda: None
    if fault == "stopped":
        everyone = node.processes() if part == "node" else processes
        for process in everyone:
            process.send_signal(signal.SIGSTOP)
        time.sleep(STOPPED_S)

        def go_on() -> None:
            for process in everyone:
                if process.is_running():
                    process.send_signal(signal.SIGCONT)

        go_on()
        return go_on
    if fault == "shm full":
        shared = Path(f"/proc/{processes[0].pid}/root/dev/shm/rl-vlm-drill")
        _fill(shared)
        return lambda: shared.unlink(missing_ok=True)
    if fault == "disk full":
        full = run_dir.parent / "full"
        _fill(full)
        time.sleep(FULL_S)
        full.unlink()
        return lambda: None
    if fault == "cut":
        cluster.cut(node)
        time.sleep(CUT_S)
        cluster.cut(node, cut=False)
        return lambda: None
    cluster.slow(node, *SLOW)
    time.sleep(SLOW_S)
    return lambda: cluster.restore(node)


def _fill(path: Path) -> None:
    with open(path, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 20)):
            pass
