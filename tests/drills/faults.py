"""What a drill does to a running cluster: kill or stop a part, cut or slow a link, fill /dev/shm."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from node_cluster import Node, NodeCluster
from runs import ENV_RUNNER, LEARNER, REGISTRY, REPLICA

STOPPED_S = 60.0

# Part -> how its processes' command lines begin.
PARTS = {
    "replica": REPLICA,
    "env runner": ENV_RUNNER,
    "registry": REGISTRY,
    "learner": LEARNER,
    "serve controller": "ray::ServeController",
}
PLACES = ("driver", "raylet", "node")
FAULTS = ("killed", "stopped", "shm full", "cut", "slow")


def find(cluster: NodeCluster, part: str, run_dir: Path) -> tuple[Node, list[psutil.Process]]:
    """The node of a part and its processes there: the first of several such parts."""
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
    raise LookupError(f"no {part} is running")


def _is_driver(process: psutil.Process, run_dir: Path) -> bool:
    line = process.cmdline()
    return str(run_dir) in line and "python" in Path(line[0]).name


def inject(cluster: NodeCluster, part: str, fault: str, run_dir: Path) -> Callable[[], None]:
    """Do it, and return what ends it again."""
    node, processes = find(cluster, part, run_dir)
    if fault == "killed":
        if part == "node":
            node.kill()
        for process in processes if part != "node" else []:
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
        with open(shared, "wb") as file:
            try:
                while file.write(b"\0" * (1 << 20)):
                    pass
            except OSError:
                pass
        return lambda: shared.unlink(missing_ok=True)
    if fault == "cut":
        cluster.cut(node)
        time.sleep(20)
        cluster.cut(node, cut=False)
        return lambda: None
    cluster.impair(node, "delay", "200ms", "loss", "5%")
    return lambda: cluster.impair(node)
