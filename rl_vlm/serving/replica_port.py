"""The port of Serve's replicas for calls between deployments.

Serve opens it on every interface and has no setting for that; this replaces a function of Serve's, which is why Ray's version is pinned
exactly. Whoever connects and has Ray's token may send pickles.
"""

from __future__ import annotations

import ipaddress
from typing import Any

import ray
from ray.serve._private import replica

EVERY_INTERFACE, LOOPBACK = "[::]", "127.0.0.1"


def keep_to_loopback() -> None:
    """On a node whose address is loopback, as of a private cluster, let this process's replica listen there alone. Serve opens the
    port after it has made the deployment's object, so call this from the constructor."""
    if not (ray.is_initialized() and ipaddress.ip_address(ray.util.get_node_ip_address()).is_loopback):
        return
    listen = replica.add_port_to_grpc_server

    def on_loopback(server: Any, address: str) -> int:
        return listen(server, address.replace(EVERY_INTERFACE, LOOPBACK))

    replica.add_port_to_grpc_server = on_loopback
