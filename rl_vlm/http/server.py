"""Runs an application in uvicorn: binds the port early, limits connections, and drains on SIGINT and SIGTERM."""

from __future__ import annotations

import ipaddress
import os
import resource
import socket
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from rl_vlm.config import HTTPSection
from rl_vlm.envs.address import LOOPBACK, TOKEN_VARIABLE
from rl_vlm.types import UserInputError

# uvicorn bounds neither how many connections there are nor how long one is silent. A connection is *waiting* while it
# owes the server the headers of a request. At a limit the one that has waited longest is closed for a new one, so that
# silent connections keep no client out; a new one is rejected where all others have requests that are being answered.

_OTHER_DESCRIPTORS = 128  # left for files, pipes and Ray's own connections
_LEAST_CONNECTIONS = 16
_TICKS = 5  # of uvicorn, a tenth of a second each, between two looks at all connections
_UNREAD_S = 30.0  # a client that reads nothing of its answer for so long is cut off
_TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"


def connection_limits(section: HTTPSection) -> tuple[int, int]:
    """How many connections the configuration allows and this process has descriptors for, and how many of one peer."""
    soft, own = resource.getrlimit(resource.RLIMIT_NOFILE)[0], "/proc/self/fd"
    free = soft - len(os.listdir(own)) - _OTHER_DESCRIPTORS if os.path.isdir(own) else soft // 2
    wanted = section.max_connections or max(4 * section.max_queue, 1024)
    total = max(min(wanted, free), _LEAST_CONNECTIONS)
    return total, min(section.max_connections_per_peer or max(3 * total // 4, 1), total)


def peer_of(host: str) -> str:
    """The peer's address, or the /64 network of an IPv6 address, all of which one machine may have."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return host


def to_close(new: Connection, others: Collection[Any], total: int, per_peer: int) -> Connection | None:
    """The connection to close when a new one has come; the new one itself where all others are busy."""
    crowd = [other for other in others if other.peer == new.peer]  # its own, although there may be room
    if len(crowd) < per_peer:
        crowd = [*others] if len(others) >= total else []
    if not crowd:
        return None
    waiting = [other for other in crowd if other.waiting]
    return min(waiting, key=lambda other: other.since) if waiting else new


class Connection(H11Protocol):
    """uvicorn's HTTP/1.1 on one connection, within limits."""

    def __init__(self, total: int, per_peer: int, headers_s: float, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._total, self._per_peer, self._headers_s = total, per_peer, headers_s
        self.peer = ""
        self.since = self.loop.time()  # when it began to wait
        self._unread, self._unread_since = 0, self.since  # bytes of an answer when they were last looked at

    @property
    def waiting(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        others = [other for other in self.connections if not other.transport.is_closing()]
        super().connection_made(transport)
        self.peer = peer_of(self.client[0]) if self.client else ""
        closed = to_close(self, others, self._total, self._per_peer)
        if closed is not None:
            closed.end(_TOO_MANY if closed is self else _TOO_LATE)

    def check(self) -> None:
        """Close the connection if its headers are late, or its client does not read."""
        now, unread = self.loop.time(), self.transport.get_write_buffer_size()  # 0 while the model is still silent
        if self.waiting and now - self.since >= self._headers_s:
            self.end(_TOO_LATE)
        if unread != self._unread:
            self._unread, self._unread_since = unread, now
        elif unread and now - self._unread_since > _UNREAD_S:
            self.transport.abort()

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():  # after `end` nothing more is read
            super().data_received(data)

    def on_response_complete(self) -> None:
        self.since = self.loop.time()
        super().on_response_complete()  # may find the next request, which came early

    def send_400_response(self, msg: str) -> None:
        """Reject bytes that are not HTTP. uvicorn would let the application answer a request whose body holds them as
        well, and log a traceback, which a client without the token could provoke."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()  # in the middle of an answer
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def end(self, answer: bytes) -> None:
        """Close the connection; a client that has begun a request gets this answer."""
        begun = self.conn.our_state is h11.IDLE and (self.conn.trailing_data[0] or answer is _TOO_MANY)
        if begun and not self.transport.is_closing():
            self.transport.write(answer)
        self.transport.close()


def check_exposure(host: str, token: str | None) -> None:
    """Raise UserInputError for an address beyond loopback without a token, and for a token that no client can send."""
    # HTTP strips blanks from the ends of a header.
    if token is not None and (not token or token != token.strip() or not token.isascii() or not token.isprintable()):
        raise UserInputError(
            f"{TOKEN_VARIABLE} must be printable ASCII text without blanks at its ends: choose another token, or "
            "unset it."
        )
    if token is None and host.lower() not in LOOPBACK:
        raise UserInputError(
            f"Listening on {host} lets other machines in: set {TOKEN_VARIABLE} to a secret token, or listen on "
            "127.0.0.1."
        )


def bind(host: str, port: int) -> socket.socket:
    """Bind the address (port 0: any free one), so that a wrong one is an error before the model is loaded. Raises
    UserInputError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
        raise _cannot_listen(host, port, error) from error
    return sock


def _cannot_listen(host: str, port: int, error: OSError | UnicodeError) -> UserInputError:
    reason = getattr(error, "strerror", None) or error
    return UserInputError(f"Cannot listen on {host} port {port} ({reason}): choose another with --host and --port.")


class HTTPServer(uvicorn.Server):
    """Serves one application on one socket until SIGINT or SIGTERM, which is raised again when running requests have
    ended or `drain_s` is over. `ready` is called when it listens."""

    def __init__(self, app: ASGIApp, sock: socket.socket, limits: HTTPSection, ready: Callable[[], None]) -> None:
        self._sock, self._ready = sock, ready
        # h11: unlike httptools it bounds the size of a request's headers.
        connection: Any = partial(Connection, *connection_limits(limits), limits.headers_s)
        config = uvicorn.Config(
            app,
            http=connection,
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=limits.drain_s,  # type: ignore[arg-type]  # of asyncio's timeouts
        )
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. Another server may have done so since the address was bound."""
        try:
            await super().startup(sockets)
        except OSError as error:
            host, port, *_ = self._sock.getsockname()
            raise _cannot_listen(host, port, error) from error
        self._ready()

    async def on_tick(self, counter: int) -> bool:
        if counter % _TICKS == 0:
            for connection in [*self.server_state.connections]:
                connection.check()  # type: ignore[union-attr]
        return await super().on_tick(counter)
