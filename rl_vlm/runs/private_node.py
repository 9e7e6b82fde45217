"""The head node of a private cluster: without the processes that a run does not use, with ports on loopback alone, and out of reach
of signals that are meant for the run.

Each process takes seconds of CPU to start, and `ray.init` waits for the API server. Ray has no setting for any of this; this derives
from its classes, which is why Ray's version is pinned exactly.
"""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
from ray._private import node, services
from ray._private.parameter import RayParams

from rl_vlm.imports import replaced

# Of a node with this address all processes listen here alone, of any other one on every interface. `ray.init` does not take it: it
# replaces it by an address that other machines reach.
LOOPBACK = "127.0.0.1"

logger = logging.getLogger(__name__)


class PrivateNode(node.Node):
    """Starts neither the autoscaler nor the log monitor, the API server only where a dashboard is wanted, and is this machine's own."""

    def __init__(self, ray_params: RayParams, **settings: Any) -> None:
        if settings.get("head"):
            ray_params.node_ip_address = LOOPBACK
            ray_params.no_monitor = True  # the autoscaler's process: this cluster has one node
            ray_params.include_log_monitor = (
                False  # it sends workers' logs to the driver, which `log_to_driver` declines
            )
        self.all_processes: dict[str, list[Any]] = {}  # Ray's own comes after checks that may raise
        try:
            super().__init__(ray_params, **settings)
        except Exception as error:
            started = {name: _condition(info.process) for name, infos in self.all_processes.items() for info in infos}
            logger.warning("A start of Ray failed (%s); its processes: %s", str(error).partition("\n")[0], started)
            # Nobody has this object yet, so nobody else could end what it has started.
            self.kill_all_processes(check_alive=False, wait=True)
            raise

    def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
        """Ray's own starts one without a dashboard as well, for its usage statistics."""
        if include_dashboard:
            super().start_api_server(include_dashboard=include_dashboard, raise_on_failure=raise_on_failure)


def _condition(process: subprocess.Popen[bytes]) -> str:
    """What has become of a process that was started."""
    code = process.poll()
    if code is not None:
        return f"ended with code {code}"
    try:
        found = psutil.Process(process.pid)
        return f"{found.status()}, {sum(found.cpu_times()[:2]):.1f} s of CPU"
    except psutil.Error as error:
        return str(error)


class OwnSession(services.ConsolePopen):
    """A process of Ray in a session of its own.

    `timeout`, batch systems and terminals signal the whole group of a command. The command answers a SIGTERM with a checkpoint and a
    clean end, for which it needs Ray's processes: without them it would wait for ever. They still end with it, whatever ends it: the
    kernel kills them when their parent is gone, and the raylet's own helpers follow within a minute.
    """

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, start_new_session=True, **settings)


@contextmanager
def private_node() -> Iterator[None]:
    """Inside this context `ray.init` makes a `PrivateNode`, whose processes have sessions of their own."""
    with replaced(node, "Node", PrivateNode), replaced(services, "ConsolePopen", OwnSession):
        yield
