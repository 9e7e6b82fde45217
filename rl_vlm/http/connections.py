"""Connections below HTTP: how many there may be, and how long one may be silent. uvicorn bounds neither.

A connection is *waiting* while it owes the server the headers of a request (it is new, or kept alive after an answer) and
*busy* from then until its request is answered. At a limit the connection that has waited longest is closed for a new one, so that
silent connections keep nobody out. A new connection is rejected only where all are busy.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import resource
from collections import Counter
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from rl_vlm.config import HTTPSection

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
    """Who has the connection: its address, or the /64 network of an IPv6 address, because one machine may have all of that."""
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
        """Reject bytes that are not HTTP. If they belong to the body of a request, the application does not answer it any more.

        uvicorn would let the application answer as well, and log a traceback, which a client without the token could provoke.
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
