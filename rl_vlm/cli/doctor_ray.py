"""The checks of `rl-vlm doctor` on Ray's doors: who may read the token, and which of its ports other machines reach."""

from __future__ import annotations

import stat
from collections.abc import Iterator

import psutil

from rl_vlm.cli.doctor_machine import Check
from rl_vlm.monitoring.samples import token_file
from rl_vlm.runs.addresses import is_loopback

_SERVERS = ("gcs_server", "raylet")  # their names are their programs'
_WORKERS = "ray::"  # begins the name of what they start


def ray_checks() -> Iterator[Check]:
    """The token's file, and the ports of the nodes of Ray on this machine."""
    yield _token()
    yield _ports(_open_ports())


def _token() -> Check:
    path = token_file()
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except FileNotFoundError:
        return Check("ray token", "ok", f"none in {path} (a private cluster makes one)")
    except OSError as error:
        return Check("ray token", "warn", f"{path}: {error.strerror}", "Let this user read the file.")
    if mode & 0o077:
        others = f"{path} has mode {mode:04o}: other users of this machine may read it, and run code in your clusters"
        return Check("ray token", "warn", others, f"Run `chmod 600 {path}`.")
    return Check("ray token", "ok", f"{path} is for its user alone")


def _open_ports() -> dict[str, set[int]]:
    """The ports of Ray's processes that listen beyond loopback, by the process's name."""
    found: dict[str, set[int]] = {}
    for process in psutil.process_iter(["name"]):
        name = process.info["name"] or ""
        if not (name in _SERVERS or name.startswith(_WORKERS)):
            continue
        try:
            connections = process.net_connections(kind="inet")
        except psutil.Error:  # it ended, or is another user's
            continue
        for connection in connections:
            if connection.status == psutil.CONN_LISTEN and not is_loopback(connection.laddr.ip):
                found.setdefault(name, set()).add(connection.laddr.port)
    return found


def _ports(found: dict[str, set[int]]) -> Check:
    if not found:
        return Check("ray ports", "ok", "none that other machines reach (a private cluster listens on loopback alone)")
    ports = "; ".join(f"{name} {', '.join(map(str, sorted(ports)))}" for name, ports in sorted(found.items()))
    remedy = (
        "Let only the cluster's nodes reach them (a firewall, or a network policy: docs/cluster.md), and start every node with "
        "RAY_AUTH_MODE=token; ports of metrics ask for no token."
    )
    return Check("ray ports", "warn", f"open to other machines: {ports}", remedy)
