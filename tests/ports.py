"""Free ports for servers that tests start."""

import contextlib
import socket


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nothing listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
