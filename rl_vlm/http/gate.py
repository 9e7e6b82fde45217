"""The outermost layer: checks token, kind of body, queue and size, and enforces deadlines, before anything is parsed."""

from __future__ import annotations

import asyncio
import hmac
import re
import time
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rl_vlm.config import HTTPSection
from rl_vlm.http.body import Body
from rl_vlm.http.budget import Budget
from rl_vlm.http.deadlines import Deadlines
from rl_vlm.http.errors import RequestError, error_response
from rl_vlm.http.json_bounds import JSONBounds
from rl_vlm.http.metrics import HTTPMetrics

DEADLINE = "rl_vlm.deadline"  # key of the request's scope: when it must be answered, in the event loop's time
BODY = "rl_vlm.body"  # and its `Body`
# How long sending an answer may continue after its deadline, for a client that reads slowly or not at all.
SEND_GRACE_S = 5.0
LOOPBACK = ("localhost", "127.0.0.1", "::1")
JSON = "application/json"
_SMALL_BODY = 1 << 20  # bytes; up to this a body does not wait for others
_LARGE_BODIES = 8  # of the largest size, may be in memory at a time
_STALL_S = 30.0  # without a byte of the body
_VALUES_PER_PART = 64  # of JSON, for each message or part that a request may have
_BYTES_PER_ESCAPE = 32  # every 64th character of base64 is a slash
# Host as RFC 9110 (7.2) has it: a name, or an IPv6 address in brackets, and perhaps a port.
_HOST = re.compile(r"(?:\[(?P<address>[0-9a-fA-F:.]+)\]|(?P<name>[^\s:@/?#\[\]]+))(?::[0-9]{0,5})?")


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
        content_type: what bodies must be. JSON's are counted while they arrive (`JSONBounds`).
    """

    def __init__(
        self,
        app: ASGIApp,
        limits: HTTPSection,
        token: str | None,
        metrics: HTTPMetrics,
        deadlines: Deadlines,
        routes: Collection[str],
        content_type: str = JSON,
    ) -> None:
        self._app = app
        self._limits = limits
        self._token = token.encode() if token is not None else None
        self.metrics = metrics
        self._deadlines = deadlines
        self._routes = frozenset(routes)
        self._content_type = content_type
        self._max_body = int(limits.max_body_mib * 2**20)
        # A character of a text is two escapes at most; some clients escape each slash of an image's base64.
        self._json_bounds = (
            _VALUES_PER_PART * limits.max_parts,
            2 * limits.max_text_chars + self._max_body // _BYTES_PER_ESCAPE,
        )
        self._bodies = Budget(_LARGE_BODIES * self._max_body)
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
            if _host_name(headers.get("host", "localhost")) not in (*LOOPBACK, self._limits.host.lower()):
                raise RequestError(403, "Without a token this server answers only to localhost: set RL_VLM_API_TOKEN.")
        elif (method, path) != ("GET", "/health"):
            scheme, _, given = headers.get("authorization", "").partition(" ")
            # Compared as bytes: in constant time, whatever characters were sent.
            if not hmac.compare_digest(given.strip().encode(), self._token) or scheme.lower() != "bearer":
                raise RequestError(
                    401, "A valid token is needed: send `Authorization: Bearer TOKEN`.", code="invalid_api_key"
                )
        if method != "POST":
            return
        if self.draining:
            raise RequestError(503, "The server is shutting down: try again later.")
        if self.in_flight >= self._limits.max_queue:
            raise RequestError(429, f"{self.in_flight} requests are waiting or running: try again later.")

    def _check_kind(self, path: str, headers: Headers) -> None:
        """A web page may send other kinds (forms, plain text) to this machine without asking; for this one a browser asks first."""
        if (
            path in self._routes
            and headers.get("content-type", "").partition(";")[0].strip().lower() != self._content_type
        ):
            raise RequestError(400, f"The body must be sent with the header Content-Type: {self._content_type}.")

    async def _admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        deadline = asyncio.get_running_loop().time() + self._limits.deadline_s
        self.in_flight += 1
        self.metrics.in_flight.set(self.in_flight)
        body = Body()
        try:
            if await self._read(receive, Headers(scope=scope), deadline, body):
                self._check_kind(scope["path"], Headers(scope=scope))
                # ASGI 2.4: the application need not listen for a disconnect itself.
                asgi = {**scope["asgi"], "spec_version": "2.4"}
                latest = max(deadline + SEND_GRACE_S - asyncio.get_running_loop().time(), 0)
                inner = {**scope, "asgi": asgi, DEADLINE: deadline, BODY: body}
                await self._run(inner, body, receive, send, latest)
        finally:
            body.release()
            self.in_flight -= 1
            self.metrics.in_flight.set(self.in_flight)

    async def _read(self, receive: Receive, headers: Headers, deadline: float, body: Body) -> bool:
        """Read the body; False when the client went away."""
        too_large = RequestError(413, f"The body is larger than {self._limits.max_body_mib:g} MiB: send less.")
        header = headers.get("content-length", "")
        announced = int(header[:20]) if header.isdecimal() else None
        if announced is not None and announced > self._max_body:
            raise too_large
        if announced is not None and announced > _SMALL_BODY:
            await self._reserve(body, announced, deadline)
        bounds = JSONBounds(*self._json_bounds) if self._content_type == JSON else None
        loop = asyncio.get_running_loop()
        try:
            while True:
                stalled = loop.time() + _STALL_S
                async with self._deadlines.at(min(deadline, stalled)):
                    message = await receive()
                if message["type"] == "http.disconnect":
                    return False
                piece = message.get("body", b"")
                body.add(piece)
                if body.size > self._max_body:
                    raise too_large
                if bounds is not None:
                    bounds.feed(piece)
                if not message.get("more_body", False):
                    return True
                if body.size > _SMALL_BODY:  # it came without its length
                    await self._reserve(body, self._max_body, deadline)
        except TimeoutError as error:
            if self._deadlines.stopping:
                raise self._deadlines.too_late(self._limits.deadline_s) from error
            if deadline <= stalled:
                why = f"not all of it came within {self._limits.deadline_s:g} s"
            else:
                why = f"nothing came for {_STALL_S:g} s"
            raise RequestError(408, f"The body did not arrive: {why}.") from error

    async def _reserve(self, body: Body, size: int, deadline: float) -> None:
        try:
            async with self._deadlines.at(deadline):
                await body.reserve(self._bodies, size)
        except TimeoutError as error:
            raise RequestError(503, "Too many large requests are being read: try again later.") from error

    async def _run(self, scope: Scope, body: Body, receive: Receive, send: Send, seconds: float) -> None:
        """Run the application; cancel it when the client goes away, or does not take its answer within `seconds`."""
        delivered = answered = False
        never = asyncio.Event()

        async def replay() -> Message:
            nonlocal delivered
            if delivered:
                await never.wait()
            delivered = True
            return {"type": "http.request", "body": body.take(), "more_body": False}

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


def _host_name(header: str) -> str:
    """The name or address of a Host header, in lower case; empty for what is none."""
    found = _HOST.fullmatch(header)
    return (found["address"] or found["name"]).lower() if found else ""


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
