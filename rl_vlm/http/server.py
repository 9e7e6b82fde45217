"""Runs the application in uvicorn: binds the port early, and drains on SIGINT and SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import resource
import signal
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from rl_vlm.config import HTTPSection
from rl_vlm.envs.address import LOOPBACK, TOKEN_VARIABLE
from rl_vlm.http.gate import Gate
from rl_vlm.types import UserInputError

# Connections below HTTP: how many there may be, and how long one may be silent. uvicorn bounds neither.
#
# A connection is *waiting* while it owes the server the headers of a request (it is new, or kept alive after an
# answer) and *busy* from then until its request is answered. At a limit the connection that has waited longest is
# closed for a new one, so that silent connections keep nobody out. A new connection is rejected only where all are
# busy.

C = TypeVar("C")

_OTHER_DESCRIPTORS = 128  # left for files, pipes and Ray's own connections
_LEAST_CONNECTIONS = 16
_SWEEP_S = 0.5
_UNREAD_S = 30.0  # a client that reads nothing of its answer for so long is cut off
_TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
_TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Connections in total and of one peer, and seconds until the headers of a request must be complete."""

    total: int
    per_peer: int
    headers_s: float

    @classmethod
    def of(cls, section: HTTPSection) -> ConnectionLimits:
        """What the configuration allows, and what this process has descriptors for."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = (
            soft - len(os.listdir("/proc/self/fd")) - _OTHER_DESCRIPTORS
            if os.path.isdir("/proc/self/fd")
            else soft // 2
        )
        wanted = section.max_connections or max(4 * section.max_queue, 1024)
        total = max(min(wanted, free), _LEAST_CONNECTIONS)
        return cls(total, min(section.max_connections_per_peer or max(3 * total // 4, 1), total), section.headers_s)


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


class ConnectionTable(Generic[C]):
    """Who is connected. It has no sockets and no clock: times are seconds of any clock that only goes forward."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._peer_of: dict[C, str] = {}
        self._count: Counter[str] = Counter()  # by peer
        self._waiting: dict[C, float] = {}  # since when, the longest first; the others are busy

    def __len__(self) -> int:
        return len(self._peer_of)

    def enter(self, connection: C, peer: str, now: float) -> tuple[bool, C | None]:
        """Whether a new connection may stay, and the one to close for it, which has left the table."""
        full = len(self) >= self._limits.total
        too_many = self._count[peer] >= self._limits.per_peer
        victim: C | None = None
        if full or too_many:
            closable = (other for other in self._waiting if not too_many or self._peer_of[other] == peer)
            victim = next(closable, None)
            if victim is None:
                return False, None
            self.leave(victim)
        self._peer_of[connection] = peer
        self._count[peer] += 1
        self._waiting[connection] = now
        return True, victim

    def set_busy(self, connection: C) -> None:
        """The headers of a request are complete."""
        self._waiting.pop(connection, None)

    def set_waiting(self, connection: C, now: float) -> None:
        """The request is answered."""
        if connection in self._peer_of:
            self._waiting.pop(connection, None)
            self._waiting[connection] = now

    def leave(self, connection: C) -> None:
        """The connection is closed. A second call does nothing."""
        peer = self._peer_of.pop(connection, None)
        if peer is not None:
            self._waiting.pop(connection, None)
            self._count[peer] -= 1
            if not self._count[peer]:
                del self._count[peer]

    def late(self, now: float) -> list[C]:
        """Connections that have owed their headers for too long."""
        return [other for other, since in self._waiting.items() if now - since >= self._limits.headers_s]


class ConnectionGuard:
    """The connections of one server, which `protocol` makes for uvicorn."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self.table: ConnectionTable[GuardedProtocol] = ConnectionTable(limits)
        # All whose sockets are open, with how much of an answer was unread when it was last looked at, and since when.
        self.open: dict[GuardedProtocol, tuple[int, float]] = {}

    def protocol(self, *args: Any, **kwargs: Any) -> GuardedProtocol:
        """uvicorn's protocol for one new connection."""
        return GuardedProtocol(self, *args, **kwargs)

    async def watch(self) -> None:
        """Close what is late, until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            now = asyncio.get_running_loop().time()
            for connection in self.table.late(now):
                connection.end(_TOO_LATE)
            for connection, (unread, since) in list(self.open.items()):
                left = connection.transport.get_write_buffer_size()  # 0 while the model is still silent
                if left != unread:
                    self.open[connection] = (left, now)
                elif left and now - since > _UNREAD_S:
                    connection.transport.abort()


class GuardedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 on one connection, which reports to the guard what it is doing."""

    def __init__(self, guard: ConnectionGuard, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._guard = guard

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        peer = peer_of(self.client[0]) if self.client else ""
        self._guard.open[self] = (0, 0.0)
        stays, victim = self._guard.table.enter(self, peer, self.loop.time())
        if victim is not None:
            victim.end(_TOO_LATE)
        if not stays:
            self.end(_TOO_MANY)

    def connection_lost(self, exc: Exception | None) -> None:
        self._guard.table.leave(self)
        self._guard.open.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():  # after `end` nothing more is read
            super().data_received(data)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before and not self.cycle.response_complete:
            self._guard.table.set_busy(self)

    def on_response_complete(self) -> None:
        self._guard.table.set_waiting(self, self.loop.time())
        super().on_response_complete()  # may find the next request, which came early

    def send_400_response(self, msg: str) -> None:
        """Reject bytes that are not HTTP; the application no longer answers a request whose body holds them.

        uvicorn would let the application answer as well, and log a traceback, which a client without the token could
        provoke.
        """
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()  # in the middle of an answer
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def end(self, answer: bytes) -> None:
        """Close the connection; a client that has begun a request gets this answer."""
        self._guard.table.leave(self)
        begun = self.conn.our_state is h11.IDLE and (self.conn.trailing_data[0] or answer is _TOO_MANY)
        if begun and not self.transport.is_closing():
            self.transport.write(answer)
        self.transport.close()


_GRACE_S = 5.0  # after the drain, for running requests to send their errors
_IDLE_CHECK_S = 0.05


def check_exposure(host: str, token: str | None) -> None:
    """Raise UserInputError for an address beyond loopback without a token, and for a token that no client can send."""
    if token is not None and (not token.strip() or not token.isascii() or not token.isprintable()):
        raise UserInputError(f"{TOKEN_VARIABLE} must be printable ASCII text: choose another token, or unset it.")
    if token is not None and token != token.strip():  # HTTP strips blanks from the ends of a header
        raise UserInputError(
            f"{TOKEN_VARIABLE} has a blank at an end, which no client can send: remove it, or choose another token."
        )
    if token is None and host.lower() not in LOOPBACK:
        raise UserInputError(
            f"Listening on {host} lets other machines in: set {TOKEN_VARIABLE} to a secret token, or listen on "
            "127.0.0.1."
        )


def bind(host: str, port: int) -> socket.socket:
    """Bind the address, so that a wrong one is an error before the model is loaded.

    Port 0 is any free port. Raises UserInputError.
    """
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


class _Server(uvicorn.Server):
    """A uvicorn server that calls `ready` when it listens and installs no signal handlers."""

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. Another server may have done so since the address was bound."""
        assert sockets is not None
        try:
            await super().startup(sockets)
        except OSError as error:
            host, port, *_ = sockets[0].getsockname()
            raise _cannot_listen(host, port, error) from error
        self._ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install nothing: uvicorn would raise the signals again when it ends, before the model is stopped."""
        yield


class HTTPServer:
    """Serves one application on one socket until it is told to stop. `ready` is called when it listens."""

    def __init__(self, app: Gate, sock: socket.socket, limits: HTTPSection, ready: Callable[[], None]) -> None:
        self._app = app
        self._sock = sock
        self._guard = ConnectionGuard(ConnectionLimits.of(limits))
        # h11: unlike httptools it bounds the size of a request's headers.
        self._config = uvicorn.Config(
            app,
            http=self._guard.protocol,  # type: ignore[arg-type]  # it calls what it is given, a class or not
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(_GRACE_S),
        )
        self._server = _Server(self._config, ready)
        self._drain_s = limits.drain_s
        self._draining: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Reject new requests and let running ones end; a second call does not wait for them.

        Call it on the server's event loop.
        """
        if self._draining is not None:
            self._server.force_exit = self._server.should_exit = True
            return
        self._app.drain()
        self._draining = asyncio.ensure_future(self._drained())

    async def _drained(self) -> None:
        """Listen while requests run, so that new clients get a 503; uvicorn would close the port at once."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_s):
                while self._app.in_flight:
                    await asyncio.sleep(_IDLE_CHECK_S)
        self._server.should_exit = True

    async def run(self) -> None:
        """Serve until `stop`."""
        watching = asyncio.ensure_future(self._guard.watch())
        try:
            await self._server.serve([self._sock])
        finally:
            watching.cancel()

    def run_until_signal(self) -> int:
        """Serve until SIGINT or SIGTERM, whose number is returned."""
        caught: list[int] = []

        async def main() -> None:
            loop = asyncio.get_running_loop()

            def handle(number: int) -> None:
                caught.append(number)
                self.stop()

            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, handle, number)
            await self.run()

        with asyncio.Runner(loop_factory=self._config.get_loop_factory()) as runner:
            runner.run(main())
        return caught[0]
