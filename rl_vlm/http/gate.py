"""The outermost layer: checks token, queue and body size, and enforces deadlines, before anything is parsed."""

from __future__ import annotations

import asyncio
import hmac
import math
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rl_vlm.config import HTTPSection
from rl_vlm.http.errors import RequestError, error_response
from rl_vlm.http.metrics import HTTPMetrics

DEADLINE = "rl_vlm.deadline"  # key of the request's scope: when it must be answered, in the event loop's time
# How long sending an answer may continue after its deadline, for a client that reads slowly or not at all.
SEND_GRACE_S = 5.0
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Deadlines:
    """Timeouts that can all be shortened when the server is told to stop."""

    def __init__(self) -> None:
        self._open: set[asyncio.Timeout] = set()
        self._latest = math.inf

    @asynccontextmanager
    async def at(self, when: float) -> AsyncIterator[None]:
        """Raise TimeoutError in the block at `when` (the loop's time), or earlier if the server stops before."""
        async with asyncio.timeout_at(min(when, self._latest)) as timeout:
            self._open.add(timeout)
            try:
                yield
            finally:
                self._open.discard(timeout)

    @property
    def stopping(self) -> bool:
        """Whether the server is stopping."""
        return self._latest < math.inf

    def shorten(self, latest: float) -> None:
        """Let nothing run longer than `latest`."""
        self._latest = latest
        for timeout in self._open:
            if not timeout.expired():
                timeout.reschedule(min(timeout.when() or latest, latest))


class Gate:
    """An ASGI application that wraps another one and refuses requests beyond the limits.

    Args:
        app: the application; it gets whole bodies within the limits, and is cancelled when its client disconnects.
        limits: the server's.
        token: what clients must send as a bearer token; None: nothing, and only requests to this machine's own names
            are answered, so that a web page that rebinds its name cannot reach the server through a browser.
        metrics: where answers are counted.
        deadlines: shared with the application.
        routes: paths that are counted by name.
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: HTTPSection,
        token: str | None,
        metrics: HTTPMetrics,
        deadlines: Deadlines,
        routes: Collection[str],
    ) -> None:
        self._app = app
        self._limits = limits
        self._token = token.encode() if token is not None else None
        self.metrics = metrics
        self._deadlines = deadlines
        self._routes = frozenset(routes)
        self._max_body = int(limits.max_body_mib * 2**20)
        self.in_flight = 0
        self.draining = False

    def drain(self) -> None:
        """Refuse new requests; running ones may continue for `drain_s`."""
        if not self.draining:
            self.draining = True
            self._deadlines.shorten(asyncio.get_running_loop().time() + self._limits.drain_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 499  # nginx's status for a client that closed the connection

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        path = scope["path"]
        try:
            self._check(scope["method"], path, Headers(scope=scope))
            if scope["method"] == "POST":
                await self._admit(scope, receive, counted)
            else:
                await self._app(scope, receive, counted)
        except RequestError as error:
            await error_response(path, error)(scope, receive, counted)
        finally:
            route = path if path in self._routes else "other"
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.seconds.labels(route).observe(time.perf_counter() - started)

    def _check(self, method: str, path: str, headers: Headers) -> None:
        if self._token is None:
            host = headers.get("host", "localhost").rsplit("@")[-1]
            name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
            if name.lower() not in (*LOOPBACK, self._limits.host.lower()):
                raise RequestError(403, "Without a token this server answers only to localhost: set RL_VLM_API_TOKEN.")
        elif path != "/health":
            scheme, _, given = headers.get("authorization", "").partition(" ")
            # Compared as bytes: in constant time, whatever characters were sent.
            if not hmac.compare_digest(given.strip().encode(), self._token) or scheme.lower() != "bearer":
                raise RequestError(
                    401, "A valid token is needed: send `Authorization: Bearer TOKEN`.", code="invalid_api_key"
                )
        if method == "POST" and self.draining:
            raise RequestError(503, "The server is shutting down: try again later.")
        if method == "POST" and self.in_flight >= self._limits.max_queue:
            raise RequestError(429, f"{self.in_flight} requests are waiting or running: try again later.")

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        deadline = asyncio.get_running_loop().time() + self._limits.deadline_s
        self.in_flight += 1
        self.metrics.in_flight.set(self.in_flight)
        try:
            body = await self._read(receive, Headers(scope=scope), deadline)
            if body is not None:
                # ASGI 2.4: the application need not listen for a disconnect itself.
                asgi = {**scope["asgi"], "spec_version": "2.4"}
                latest = max(deadline + SEND_GRACE_S - asyncio.get_running_loop().time(), 0)
                await self._run({**scope, "asgi": asgi, DEADLINE: deadline}, body, receive, send, latest)
        finally:
            self.in_flight -= 1
            self.metrics.in_flight.set(self.in_flight)

    async def _read(self, receive: Receive, headers: Headers, deadline: float) -> bytes | None:
        """The body; None when the client went away."""
        too_large = RequestError(413, f"The body is larger than {self._limits.max_body_mib:g} MiB: send less.")
        announced = headers.get("content-length", "0")
        if announced.isdecimal() and int(announced[:20]) > self._max_body:
            raise too_large
        pieces: list[bytes] = []
        size = 0
        try:
            async with self._deadlines.at(deadline):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    pieces.append(message.get("body", b""))
                    size += len(pieces[-1])
                    if size > self._max_body:
                        raise too_large
                    if not message.get("more_body", False):
                        return b"".join(pieces)
        except TimeoutError as error:
            raise RequestError(408, f"The body did not arrive within {self._limits.deadline_s:g} s.") from error

    async def _run(self, scope: Scope, body: bytes, receive: Receive, send: Send, seconds: float) -> None:
        """Run the application; cancel it when the client goes away, or does not take its answer within `seconds`."""
        delivered = answered = False
        never = asyncio.Event()

        async def replay() -> Message:
            nonlocal delivered
            if delivered:
                await never.wait()
            delivered = True
            return {"type": "http.request", "body": body, "more_body": False}

        async def watched(message: Message) -> None:
            nonlocal answered
            answered = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        work = asyncio.ensure_future(self._app(scope, replay, watched))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait((work, gone), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not answered:
                work.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        if not work.cancelled():
            work.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
