"""The outermost layer: checks token, content type, queue, body size and deadlines before anything is parsed."""

from __future__ import annotations

import asyncio
import hmac
import math
import re
import time
import uuid
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rl_vlm.config import HTTPSection
from rl_vlm.envs.address import LOOPBACK
from rl_vlm.types import Completion, RLVLMError

# HTTP status -> OpenAI's error type.
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_RETRY_AFTER_S = 1  # clients add their own jitter and backoff


class RequestError(RLVLMError):
    """A request that cannot be answered; `status` is HTTP's, `code` and `param` are OpenAI's."""

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    @property
    def headers(self) -> dict[str, str]:
        """Retry-After for a server that is busy, WWW-Authenticate for a missing token."""
        if self.status == 401:
            return {"WWW-Authenticate": "Bearer"}
        return {"Retry-After": str(_RETRY_AFTER_S)} if self.status in (429, 503) else {}


def error_body(error: RequestError) -> dict[str, Any]:
    """OpenAI's shape."""
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


def error_response(path: str, error: RequestError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """OpenAI's shape under `/v1`, `{"detail"}` elsewhere."""
    content = error_body(error) if path.startswith("/v1") else {"detail": str(error)}
    return JSONResponse(content, error.status, {**error.headers, **(headers or {})})


class Deadlines:
    """Timeouts of running requests, which `shorten` moves forward when the server stops."""

    def __init__(self) -> None:
        self._open: set[asyncio.Timeout] = set()
        self._latest = math.inf

    @asynccontextmanager
    async def at(self, when: float) -> AsyncIterator[None]:
        """Raise TimeoutError in the block at `when` (the event loop's time), or earlier if the server stops before."""
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

    def too_late(self, status: int, message: str) -> RequestError:
        """The error of a request whose time is over; while the server stops, the error says that instead."""
        if self.stopping:
            return RequestError(503, "The server is shutting down: try again later.")
        return RequestError(status, message)


_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class HTTPMetrics:
    """Prometheus' metrics of one server, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()

        def seconds(name: str, about: str, labels: Sequence[str] = ()) -> Histogram:
            return Histogram(f"rl_vlm_http_{name}_seconds", about, labels, registry=self._registry, buckets=_SECONDS)

        def count(name: str, about: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"rl_vlm_http_{name}", about, labels, registry=self._registry)

        def gauge(name: str, about: str) -> Gauge:
            return Gauge(f"rl_vlm_http_{name}", about, registry=self._registry)

        self.requests = count("requests", "Answers.", ["route", "status"])
        self.seconds = seconds("request", "From the first byte to the last.", ["route"])
        self.first_token = seconds("first_token", "Of streams.")
        self.queue = seconds("queue", "In the engine's queue, of whole answers.")
        self.tokens = count("tokens", "Prompt and sampled tokens.", ["kind"])
        self.in_flight = gauge("in_flight", "Requests that are waiting or running.")
        self.version = gauge("policy_version", "The version that answered last.")
        self.stream_errors = count("stream_errors", "Streams that ended with an error event.")

    def answered(self, num_prompt_tokens: int, num_sampled: int, version: int) -> None:
        """Count one answer of the model."""
        self.tokens.labels("prompt").inc(num_prompt_tokens)
        self.tokens.labels("sampled").inc(num_sampled)
        self.version.set(version)

    def completed(self, completion: Completion) -> None:
        """Count one whole answer."""
        self.queue.observe(completion.queue_s)
        sampled = sum(len(sample.token_ids) for sample in completion.samples)
        self.answered(len(completion.prompt_ids), sampled, completion.policy_version)

    def text(self) -> str:
        """All metrics."""
        return generate_latest(self._registry).decode()


DEADLINE = "rl_vlm.deadline"  # key of the request's scope: when it must be answered, in the event loop's time
# How long sending an answer may continue after its deadline, for a client that reads slowly or not at all.
SEND_GRACE_S = 5.0
JSON = "application/json"
_REQUEST_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)  # of clients, which is sent back
# Host as RFC 9110 (7.2) has it: a name, or an IPv6 address in brackets, and perhaps a port.
_HOST = re.compile(r"(?:\[(?P<address>[0-9a-fA-F:.]+)\]|(?P<name>[^\s:@/?#\[\]]+))(?::[0-9]{0,5})?")


class Gate:
    """An ASGI application that wraps another one and rejects requests beyond the limits.

    Args:
        app: the application; it gets whole bodies within the limits, and is cancelled when its client disconnects.
        limits: the server's.
        token: what clients must send as a bearer token. None: only requests to this machine's own names are answered,
            so that a web page that rebinds its name cannot reach the server through a browser.
        metrics: where answers are counted.
        deadlines: shared with the application.
        routes: paths that are counted by name.
        content_type: what bodies must be. A browser lets a web page send this type to another server only if that
            server agrees (CORS), which this one does not.
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
        self.in_flight = 0
        self.draining = False

    def drain(self) -> None:
        """Reject new requests; running ones may continue for `drain_s`."""
        if not self.draining:
            self.draining = True
            self._deadlines.shorten(asyncio.get_running_loop().time() + self._limits.drain_s)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 499  # nginx's status for a client that closed the connection
        path, headers = scope["path"], Headers(scope=scope)
        given = headers.get("x-request-id", "")
        name = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", name.encode())]}
            await send(message)

        try:
            self._check_caller(scope["method"], path, headers)
            if scope["method"] == "HEAD":  # a GET of which the server sends the headers alone
                scope = {**scope, "method": "GET"}
            if scope["method"] == "POST":
                self._check_post(path, headers)
                await self._answer(scope, receive, counted)
            else:
                await self._app(scope, receive, counted)
        except RequestError as error:
            await error_response(path, error)(scope, receive, counted)
        finally:
            route = path if path in self._routes else "other"
            self.metrics.requests.labels(route, str(status)).inc()
            self.metrics.seconds.labels(route).observe(time.perf_counter() - started)

    def _check_caller(self, method: str, path: str, headers: Headers) -> None:
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

    def _check_post(self, path: str, headers: Headers) -> None:
        if self.draining:
            raise RequestError(503, "The server is shutting down: try again later.")
        if self.in_flight >= self._limits.max_queue:
            raise RequestError(429, f"{self.in_flight} requests are waiting or running: try again later.")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if path in self._routes and kind != self._content_type:
            raise RequestError(400, f"The body must be sent with the header Content-Type: {self._content_type}.")

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._limits.deadline_s
        self._count(1)
        try:
            body = await self._read(receive, Headers(scope=scope), deadline)
            if body is not None:
                # ASGI 2.4: the application need not listen for a disconnect itself.
                inner = {**scope, "asgi": {**scope["asgi"], "spec_version": "2.4"}, DEADLINE: deadline}
                await self._run(inner, body, receive, send, max(deadline + SEND_GRACE_S - loop.time(), 0))
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        self.in_flight += change
        self.metrics.in_flight.set(self.in_flight)

    async def _read(self, receive: Receive, headers: Headers, deadline: float) -> list[bytes] | None:
        """The body in pieces; None when the client went away."""
        limit = self._limits.max_body_mib
        too_large = RequestError(413, f"The body is larger than {limit:g} MiB: send less.")
        announced = headers.get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > limit * 2**20:
            raise too_large
        pieces: list[bytes] = []
        size, more = 0, True
        try:
            async with self._deadlines.at(deadline):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    pieces.append(message.get("body", b""))
                    size += len(pieces[-1])
                    if size > limit * 2**20:
                        raise too_large
                    more = message.get("more_body", False)
        except TimeoutError as error:
            late = f"The body did not arrive: not all of it came within {self._limits.deadline_s:g} s."
            raise self._deadlines.too_late(408, late) from error
        return pieces

    async def _run(self, scope: Scope, body: list[bytes], receive: Receive, send: Send, seconds: float) -> None:
        """Run the application; cancel it when the client goes away, or does not take its answer within `seconds`."""
        answered = False

        async def replay() -> Message:
            if not body:
                await asyncio.Event().wait()  # until it is cancelled
            whole = b"".join(body)
            body.clear()  # the application alone decides how long the body stays in memory
            return {"type": "http.request", "body": whole, "more_body": False}

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
    """The name or address of a Host header, in lower case; empty for a malformed one."""
    match = _HOST.fullmatch(header)
    return (match["address"] or match["name"]).lower() if match else ""


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
