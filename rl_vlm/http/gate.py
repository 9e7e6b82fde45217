"""The outermost layer: checks token, content type, queue and body before anything is parsed, and answers errors."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.routing import Route, Router
from starlette.types import Message, Receive, Scope, Send

from rl_vlm.config import HTTPSection
from rl_vlm.engines.base import RequestTooLargeError, VersionGoneError
from rl_vlm.envs.address import LOOPBACK, url_host
from rl_vlm.types import RLVLMError, UserInputError

logger = logging.getLogger("rl_vlm.http")

# HTTP status -> when it is answered, and what to do.
STATUSES = {
    400: "The request is wrong, or larger than the model's context: `param` names the field. Change the request.",
    401: "The bearer token is missing or wrong: send `Authorization: Bearer TOKEN`.",
    403: "Without a token the server answers only to names of its own machine: set `RL_VLM_API_TOKEN`, or ask "
    "`localhost`.",
    404: "There is no such path, model, version or adapter: `GET /v1/models` lists the models.",
    405: "The path has another method.",
    408: "Headers or body did not arrive in time (`http.headers_s`, `http.deadline_s`): send them at once.",
    413: "The body is larger than `http.max_body_mib`: send less.",
    415: "The body is compressed: send it without `Content-Encoding`.",
    429: "`http.max_queue` requests are waiting or running: try again after the seconds of `Retry-After`.",
    500: "The engine failed, or the server has a bug: its log says more. Try again, once.",
    503: "The server is shutting down, no replica is ready, or all connections are busy: try again later.",
    504: "No complete answer within `http.deadline_s`: ask for fewer tokens or samples, or later.",
}
# HTTP status -> OpenAI's error type.
_TYPES = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
# Retry-After: clients add their own jitter and backoff.
_HEADERS = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "1"}}
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_NOTHING_SENT = 499  # nginx's status for a client that closed the connection


class RequestError(RLVLMError):
    """A request that cannot be answered; `status` is HTTP's, `code` and `param` are OpenAI's.

    Do: read the status codes in the reference of the HTTP API.
    """

    def __init__(self, status: int, message: str, *, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


def as_request_error(error: Exception) -> RequestError:
    """The error that a client may see; unexpected ones are logged and not shown."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, HTTPException):
        return RequestError(error.status_code, error.detail)
    if isinstance(error, RLVLMError):
        # A replica's error is the `cause` of the RayTaskError that ours comes from.
        reason = getattr(error.__cause__, "cause", error)
        if isinstance(reason, VersionGoneError):
            return RequestError(404, str(reason), code="model_not_found", param="model")
        of_client = isinstance(error, UserInputError) or isinstance(reason, RequestTooLargeError)
        # The first line only: Ray appends tracebacks.
        sentence = next(iter(str(error).splitlines()), "The engine failed.")
        return RequestError(400 if of_client else 500, sentence)
    logger.error("A request failed unexpectedly.", exc_info=error)
    return RequestError(500, "Internal error: the server's log says more.")


def error_body(error: RequestError) -> dict[str, Any]:
    kind = _TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": error.code}}


# Keys of a POST's scope: its whole body, which the application takes out, so that it decides how long it stays in
# memory; and when the request must be answered, in the event loop's time.
BODY, DEADLINE = "rl_vlm.body", "rl_vlm.deadline"
# How long sending an answer may continue after its deadline, for a client that reads slowly or not at all.
SEND_GRACE_S = 5.0
JSON = "application/json"
_REQUEST_ID = re.compile(r"[\w.:/+=@-]{1,128}", re.ASCII)  # of clients, which is sent back
_PORT = re.compile(r":[0-9]{0,5}$")


class Gate:
    """An ASGI application of some routes, which get no request beyond the limits.

    Args:
        routes: a POST's body is in its scope. Its handler is cancelled when its client disconnects. What handlers raise
            is answered by OpenAI's errors, with `detail` beside outside of `/v1`.
        token: what clients must send as a bearer token. None: only requests to this machine's own names are answered,
            so that a web page that rebinds its name cannot reach the server through a browser.
        content_type: of bodies. A browser lets a web page send it only to a server that agrees (CORS); this one does
            not.
    """

    def __init__(
        self, routes: Sequence[Route], limits: HTTPSection, token: str | None, content_type: str = JSON
    ) -> None:
        self.routes, self._app = routes, Router(routes)
        self._paths = {route.path: route.methods or () for route in routes}
        self._limits, self._content_type = limits, content_type
        self._token = token.encode() if token is not None else None
        self.in_flight = 0
        self.registry = of = CollectorRegistry()
        self.tokens = Counter("rl_vlm_http_tokens", "Prompt and sampled tokens.", ["kind"], registry=of)
        self._requests = Counter("rl_vlm_http_requests", "Answers.", ["route", "status"], registry=of)
        about = "rl_vlm_http_request_seconds", "From first byte to last.", ["route"]
        self._seconds = Histogram(*about, registry=of, buckets=_BUCKETS)
        waiting = Gauge("rl_vlm_http_in_flight", "Requests that are waiting or running.", registry=of)
        waiting.set_function(lambda: self.in_flight)
        self._names = {url_host(name) for name in (*LOOPBACK, limits.host.lower())}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, path = time.perf_counter(), _NOTHING_SENT, scope["path"]
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id.encode())]}
            await send(message)

        async def answer(error: RequestError, more: Mapping[str, str] | None = None) -> None:
            content = error_body(error) | ({} if path.startswith("/v1") else {"detail": str(error)})
            headers = {**_HEADERS.get(error.status, {}), **(more or {})}
            await JSONResponse(content, error.status, headers)(scope, receive, counted)

        scope["app"] = self  # starlette then raises what it would answer itself, such as 405
        try:
            self._check_caller(scope["method"], path, Headers(scope=scope))
            if scope["method"] == "POST":
                await self._post(scope, receive, counted)
            else:
                await self._app(scope, receive, counted)
        except ClientDisconnect:
            pass
        except asyncio.CancelledError:  # the server has stopped, and drain_s is over
            if status == _NOTHING_SENT:
                await answer(RequestError(503, "The server is shutting down: try again later."))
        except Exception as error:
            if status != _NOTHING_SENT:
                raise
            await answer(as_request_error(error), getattr(error, "headers", None))
        finally:
            route = path if path in self._paths else "other"
            self._requests.labels(route, str(status)).inc()
            self._seconds.labels(route).observe(time.perf_counter() - started)

    def _check_caller(self, method: str, path: str, headers: Headers) -> None:
        if self._token is None:
            if _PORT.sub("", headers.get("host", "localhost").lower()) not in self._names:
                raise RequestError(403, "Without a token this server answers only to localhost: set RL_VLM_API_TOKEN.")
        elif (method, path) != ("GET", "/health"):
            scheme, _, given = headers.get("authorization", "").partition(" ")
            # Compared as bytes: in constant time, whatever characters were sent.
            if not hmac.compare_digest(given.strip().encode(), self._token) or scheme.lower() != "bearer":
                raise RequestError(
                    401, "A valid token is needed: send `Authorization: Bearer TOKEN`.", code="invalid_api_key"
                )

    async def _post(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the body and run the application, until the client goes away or does not take its answer in time."""
        headers = Headers(scope=scope)
        if self.in_flight >= self._limits.max_queue:
            raise RequestError(429, f"{self.in_flight} requests are waiting or running: try again later.")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if "POST" in self._paths.get(scope["path"], ()):
            if kind != self._content_type:
                raise RequestError(400, f"The body must be sent with the header Content-Type: {self._content_type}.")
            if headers.get("content-encoding", "identity") != "identity":
                raise RequestError(415, "A body must not be compressed: send it without Content-Encoding.")
        loop = asyncio.get_running_loop()
        scope[DEADLINE] = deadline = loop.time() + self._limits.deadline_s
        # ASGI 2.4: the application need not listen for a disconnect itself.
        scope["asgi"] = {**scope["asgi"], "spec_version": "2.4"}
        self.in_flight += 1
        try:
            scope[BODY] = await self._read(receive, headers.get("content-length", ""), deadline)
            work = asyncio.ensure_future(self._app(scope, receive, send))
            gone = asyncio.ensure_future(_disconnected(receive))
            try:
                seconds = max(deadline + SEND_GRACE_S - loop.time(), 0)
                await asyncio.wait((work, gone), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            finally:
                work.cancel()
                gone.cancel()
                await asyncio.gather(work, gone, return_exceptions=True)
            if not work.cancelled():
                work.result()
        finally:
            self.in_flight -= 1

    async def _read(self, receive: Receive, announced: str, deadline: float) -> bytes:
        limit = self._limits.max_body_mib * 2**20
        too_large = RequestError(413, f"The body is larger than {self._limits.max_body_mib:g} MiB: send less.")
        if announced.isdecimal() and int(announced[:20]) > limit:
            raise too_large
        pieces: list[bytes] = []
        size, more = 0, True
        try:
            async with asyncio.timeout_at(deadline):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    pieces.append(message.get("body", b""))
                    size += len(pieces[-1])
                    if size > limit:
                        raise too_large
                    more = message.get("more_body", False)
        except TimeoutError as error:
            late = f"The body did not arrive: not all of it came within {self._limits.deadline_s:g} s."
            raise RequestError(408, late) from error
        return b"".join(pieces)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
