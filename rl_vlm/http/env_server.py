"""Serves an environment over HTTP, for `RemoteEnv`: sessions, each with an environment of its own.

POST /env takes and returns a frame (see `frames.py`): {"op": "open"} → {"session", "num_items", "metrics"}; then
`reset`, `step` and `close` with the session, and a number that grows by one. A request whose number was answered gets
the same answer.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rl_vlm.config import HTTPSection
from rl_vlm.deadlines import hung_calls
from rl_vlm.envs.address import TOKEN_VARIABLE, url_host
from rl_vlm.envs.base import VisionEnv
from rl_vlm.envs.errors import describe_error
from rl_vlm.envs.isolation import EnvWorker, ProcessEnv
from rl_vlm.envs.registry import make
from rl_vlm.envs.remote import FRAME
from rl_vlm.frames import Frame, FrameError, pack_frame, unpack_frame
from rl_vlm.http.gate import BODY, Gate, RequestError
from rl_vlm.http.server import HTTPServer, bind, check_exposure

_MAX_REQUEST_MIB = 4.0  # a request is one answer of the policy
_CLOSE_S = 3.0
_UNUSED_S = 60.0  # after which a session may be ended for another, where all are taken
_SPLITS = ("train", "test")

T = TypeVar("T")


class _Session:
    """One environment on a thread of its own, and the last answer that it gave."""

    def __init__(self, build: Callable[[], VisionEnv]) -> None:
        self._worker = EnvWorker(build)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="env")
        self._last: Future[Any] | None = None  # the thread's latest work
        self._number = 0
        self._answer = b""
        self.ended = False  # its client has left
        self.used = time.monotonic()

    @property
    def busy(self) -> bool:
        return self._last is not None and not self._last.done()

    def submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """Have the thread do something, after what it does now."""
        self._last = future = self._thread.submit(work, *arguments)
        return future

    def end(self) -> Future[Any]:
        """Close the environment as soon as it is idle."""
        if not self.ended:
            self.ended = True
            self.submit(self._worker.answer, {"op": "close"})
            self._thread.shutdown(wait=False)
        assert self._last is not None
        return self._last

    def open(self) -> Frame:
        """On the session's thread: make the environment; its metrics and its splits' sizes."""
        reply, _ = self._worker.answer({"op": "make"})
        sizes: dict[str, Any] = {}
        for split in _SPLITS if "error" not in reply else ():
            asked, _ = self._worker.answer({"op": "num_items", "split": split})
            reply, sizes[split] = {**reply, **asked}, asked.get("value")
        self.used = time.monotonic()
        return {**reply, "num_items": sizes}, []

    def carry_out(self, request: dict[str, Any]) -> bytes:
        """On the session's thread: the frame that answers; the first one's where a request comes again."""
        number = request.get("number")
        self.used = time.monotonic()
        if number == self._number and self._answer:
            return self._answer
        if number != self._number + 1:
            raise RequestError(409, f"Request {number} does not follow request {self._number}.")
        reply, blobs = self._worker.answer(request)
        try:
            self._answer = pack_frame(reply, blobs)
        except (FrameError, ValueError, TypeError, RecursionError) as error:  # info that JSON cannot hold
            text = f"the reply cannot be sent ({describe_error(error)})"
            self._answer = pack_frame({"kind": "env", "error": text}, [])
        self._number, self.used = number, time.monotonic()
        return self._answer


class EnvServer:
    """The sessions of one server, `max_sessions` at a time; `build` makes one environment."""

    def __init__(self, build: Callable[[], VisionEnv], max_sessions: int) -> None:
        self._build, self._max_sessions = build, max_sessions
        self._sessions: dict[str, _Session] = {}

    @property
    def num_sessions(self) -> int:
        """Sessions that are open, or whose environment is still at work although the client is gone."""
        return sum(not session.ended or session.busy for session in self._sessions.values())

    async def answer(self, request: dict[str, Any]) -> bytes:
        """The frame that answers a request. Raises RequestError."""
        op = request.get("op")
        if op == "open":
            return await self._open()
        name = request.get("session")
        session = self._sessions.get(name) if isinstance(name, str) else None
        if session is None or session.ended:
            raise RequestError(410, "There is no such session: open another one.")
        if op == "close":
            busy, closing = session.busy, session.end()
            if not busy:
                await asyncio.wrap_future(closing)
            return pack_frame({}, [])
        if op not in ("reset", "step"):
            raise RequestError(400, "op must be open, reset, step or close.")
        return await asyncio.wrap_future(session.submit(session.carry_out, request))

    async def _open(self) -> bytes:
        self._sessions = {name: one for name, one in self._sessions.items() if not one.ended or one.busy}
        since = time.monotonic() - _UNUSED_S
        unused = [one for one in self._sessions.values() if not (one.busy or one.ended) and one.used < since]
        if self.num_sessions >= self._max_sessions and unused:
            closing = min(unused, key=lambda session: session.used).end()
            await asyncio.wait([asyncio.wrap_future(closing)], timeout=_CLOSE_S)
        if self.num_sessions >= self._max_sessions:
            raise RequestError(429, f"{self._max_sessions} sessions are open, as many as --max-sessions allows")
        name = secrets.token_hex(16)
        session = self._sessions[name] = _Session(self._build)  # it counts while it is made
        try:
            reply, _ = await asyncio.wrap_future(session.submit(session.open))
        except BaseException:  # the client is gone, and no other knows the name
            session.end()
            raise
        if "error" in reply:
            session.end()  # the environment may be made all the same
        return pack_frame({**reply, "session": name}, [])

    def app(self, limits: HTTPSection, token: str | None) -> Gate:
        """The ASGI application, behind the same gate as a served model's: token, body size, queue and deadline."""

        async def env(request: Request) -> Response:
            try:
                content, blobs = unpack_frame(request.scope.pop(BODY))
            except FrameError as error:
                raise RequestError(400, f"The body is not a frame: {error}.") from error
            if blobs or not isinstance(content, dict):
                raise RequestError(400, "A request has no images.")
            return Response(await self.answer(content), media_type=FRAME)

        async def health(_: Request) -> Response:
            return JSONResponse({"status": "ok", "sessions": self.num_sessions})

        return Gate([Route("/env", env, methods=["POST"]), Route("/health", health)], limits, token, FRAME)

    def close(self, timeout_s: float = _CLOSE_S) -> bool:
        """Close every environment; whether all were idle within the time. One that hangs keeps its thread."""
        return not wait([session.end() for session in self._sessions.values()], timeout_s).not_done


def serve_environment(
    env_id: str,
    kwargs: dict[str, Any],
    *,
    host: str,
    port: int,
    max_sessions: int,
    processes: bool,
    announce: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM, which is raised again at the end. Raises UserInputError before it listens."""
    token = os.environ.get(TOKEN_VARIABLE)
    check_exposure(host, token)
    limits = HTTPSection(host=host, port=port, max_body_mib=_MAX_REQUEST_MIB, max_queue=2 * max_sessions, drain_s=2.0)

    def build() -> VisionEnv:
        if processes:
            return ProcessEnv(env_id, kwargs, step_timeout_s=limits.deadline_s)
        return make(env_id, **kwargs)

    build().close()  # an error shows here, not at the first client
    with bind(host, port) as sock:
        server = EnvServer(build, max_sessions=max_sessions)
        address = f"http://{url_host(host)}:{sock.getsockname()[1]}"
        said = f"required ({TOKEN_VARIABLE})" if token else "none: programs on this machine may connect"
        ready = f"Serving {env_id} on {address}, {max_sessions} at a time; token {said}. Clients: env.id={address}"
        http = HTTPServer(server.app(limits, token), sock, limits, lambda: announce(ready))
        try:
            http.run([sock])
        finally:
            if not server.close():
                hung_calls.append(("an environment", threading.Event()))
