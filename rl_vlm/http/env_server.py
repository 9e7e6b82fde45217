"""Serves an environment over HTTP, for `RemoteEnv`: sessions, each with an environment of its own.

POST /env takes and returns a frame (see `frames.py`): {"op": "open"} → {"session", "num_items", "metrics", "max_sessions"};
then `reset`, `step` and `close` with the session, and a number that grows by one. A request whose number was answered gets the same answer.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rl_vlm.asking.http_endpoints import url_host
from rl_vlm.config import HTTPSection
from rl_vlm.envs.adapters.remote import FRAME
from rl_vlm.envs.apart import EnvWorker, short_line
from rl_vlm.envs.base import VisionEnv
from rl_vlm.envs.isolation import ProcessEnv
from rl_vlm.envs.registry import make
from rl_vlm.frames import Frame, FrameError, pack_frame, unpack_frame
from rl_vlm.http.deadlines import Deadlines
from rl_vlm.http.errors import RequestError, error_response
from rl_vlm.http.gate import Gate
from rl_vlm.http.metrics import HTTPMetrics
from rl_vlm.http.server import TOKEN_VARIABLE, HTTPServer, bind, check_exposure
from rl_vlm.hung_threads import note_hung_thread

_MAX_REQUEST_MIB = 4.0  # a request is one answer of the policy
_CLOSE_S = 3.0
_UNUSED_S = 60.0  # after which a session may be ended for another, where all are taken
_SPLITS = ("train", "test")


class _Session:
    """One environment, and the last answer it gave."""

    def __init__(
        self, build: Callable[[], VisionEnv], clock: Callable[[], float], forget: Callable[[], object]
    ) -> None:
        self._worker = EnvWorker(build)
        self._forget = forget  # called when the environment is closed
        self._closed = False
        self.ended = False  # its client is gone
        self._lock = threading.Lock()
        self._clock = clock
        self._number = 0
        self._answer = b""
        self.used = clock()

    def open(self) -> Frame:
        """Make the environment; its metrics and its splits' sizes."""
        try:
            return self._open()
        finally:
            self._close_if_ended()

    def _open(self) -> Frame:
        with self._lock:
            if self._closed:  # before its turn came
                return {"kind": "crash", "error": "the client is gone"}, []
            reply, _ = self._worker.answer({"op": "make"})
            sizes: dict[str, Any] = {}
            for split in _SPLITS if "error" not in reply else ():
                asked, _ = self._worker.answer({"op": "num_items", "split": split})
                reply, sizes[split] = {**reply, **asked}, asked.get("value")
            self.used = self._clock()
            return {**reply, "num_items": sizes}, []

    @property
    def busy(self) -> bool:
        """Whether its environment is at work."""
        return self._lock.locked()

    def carry_out(self, request: dict[str, Any]) -> bytes:
        """The frame that answers; a request that comes again waits for the first one and gets its answer."""
        try:
            with self._lock:
                return self._carry_out(request)
        finally:
            self._close_if_ended()

    def _carry_out(self, request: dict[str, Any]) -> bytes:
        number = request.get("number")
        self.used = self._clock()
        if number == self._number and self._answer:
            return self._answer
        if number != self._number + 1:
            raise RequestError(409, f"Request {number} does not follow request {self._number}.")
        reply, blobs = self._worker.answer(request)
        try:
            self._answer = pack_frame(reply, blobs)
        except (FrameError, ValueError, TypeError, RecursionError) as error:  # info that JSON cannot hold
            text = f"the reply cannot be sent ({short_line(error)})"
            self._answer = pack_frame({"kind": "env", "error": text}, [])
        self._number, self.used = number, self._clock()
        return self._answer

    def end(self) -> None:
        """Close the environment now, or, where it is at work, as soon as it is done; no thread waits for that."""
        self.ended = True
        self._close_if_ended()

    def _close_if_ended(self) -> None:
        # Whoever holds the lock looks again after it has let go, so one of the two closes it.
        if self.ended and self._lock.acquire(blocking=False):
            try:
                self._close()
            finally:
                self._lock.release()

    def close(self) -> None:
        """Close the environment, once it is idle."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            self._worker.answer({"op": "close"})
            self._forget()


class EnvServer:
    """The sessions of one server.

    Args:
        build: makes one environment.
        max_sessions: at a time.
        idle_s: a session that is not used for so long is ended; where all are taken, after a minute if it is the longest unused.
        clock: seconds.
    """

    def __init__(
        self,
        build: Callable[[], VisionEnv],
        max_sessions: int,
        idle_s: float = 1800.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._build = build
        self._max_sessions, self._idle_s, self._clock = max_sessions, idle_s, clock
        self._sessions: dict[str, _Session] = {}
        self._threads = ThreadPoolExecutor(max_sessions + 1, thread_name_prefix="env")

    @property
    def num_sessions(self) -> int:
        """Sessions that are open, or whose environment is still at work though the client is gone."""
        return sum(not one.ended or one.busy for one in list(self._sessions.values()))

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
            await self._in_thread(session.end)
            return pack_frame({}, [])
        if op not in ("reset", "step"):
            raise RequestError(400, "op must be open, reset, step or close.")
        return await self._in_thread(lambda: session.carry_out(request))

    async def _open(self) -> bytes:
        for name, one in list(self._sessions.items()):
            if self._clock() - one.used > self._idle_s:
                self._end(name)
        if self.num_sessions >= self._max_sessions:
            # Clients that were killed never close theirs. One that lives opens another with its next episode.
            unused = {name: one.used for name, one in list(self._sessions.items()) if not (one.busy or one.ended)}
            oldest = min(unused, key=unused.__getitem__, default="")
            if oldest and self._clock() - unused[oldest] > _UNUSED_S:
                self._end(oldest)
        if self.num_sessions >= self._max_sessions:
            raise RequestError(429, f"{self._max_sessions} sessions are open, as many as --max-sessions allows")
        name = secrets.token_hex(16)
        session = _Session(self._build, self._clock, partial(self._sessions.pop, name, None))
        self._sessions[name] = session  # it counts while it is made
        try:
            reply, _ = await self._in_thread(session.open)
        except BaseException:  # the client is gone, and nobody else knows the name
            self._end(name)
            raise
        if "error" in reply:
            self._end(name)  # it may be made, and its splits not counted
        return pack_frame({**reply, "session": name, "max_sessions": self._max_sessions}, [])

    def _end(self, name: str) -> None:
        session = self._sessions.get(name)
        if session is not None:  # else a thread has just ended it
            session.ended = True
            self._threads.submit(session.end)

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)

    def close(self, timeout_s: float = _CLOSE_S) -> bool:
        """Close every environment; whether all were idle within the time. One that hangs keeps its thread."""
        closing = [self._threads.submit(session.close) for session in list(self._sessions.values())]
        self._sessions.clear()
        self._threads.shutdown(wait=False)
        return not wait(closing, timeout_s).not_done


def build_env_app(server: EnvServer, limits: HTTPSection, token: str | None) -> Gate:
    """The ASGI application, behind the same gate as a served model's: token, body size, queue and deadline."""

    async def env(request: Request) -> Response:
        try:
            content, blobs = unpack_frame(await request.body())
            if blobs or not isinstance(content, dict):
                raise RequestError(400, "A request has no images.")
            return Response(await server.answer(content), media_type=FRAME)
        except FrameError as error:
            return error_response("/env", RequestError(400, f"The body is not a frame: {error}."))
        except RequestError as error:
            return error_response("/env", error)

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "draining" if gate.draining else "ok", "sessions": server.num_sessions})

    app = Starlette(routes=[Route("/env", env, methods=["POST"]), Route("/health", health)])
    gate = Gate(app, limits, token, HTTPMetrics(), Deadlines(), ["/env", "/health"], content_type=FRAME)
    return gate


def serve_environment(
    env_id: str,
    kwargs: dict[str, Any],
    *,
    host: str,
    port: int,
    max_sessions: int,
    processes: bool,
    announce: Callable[[str], None],
) -> int:
    """Serve until SIGINT or SIGTERM, whose number is returned. Raises UserInputError before it listens."""
    token = os.environ.get(TOKEN_VARIABLE)
    check_exposure(host, token)
    limits = HTTPSection(host=host, port=port, max_body_mib=_MAX_REQUEST_MIB, max_queue=2 * max_sessions, drain_s=2.0)

    def build() -> VisionEnv:
        if processes:
            return ProcessEnv(env_id, kwargs, step_timeout_s=limits.deadline_s)
        return make(env_id, **kwargs)

    build().close()  # what is wrong is said here, not to the first client
    with bind(host, port) as sock:
        server = EnvServer(build, max_sessions=max_sessions)
        address = f"http://{url_host(host)}:{sock.getsockname()[1]}"
        said = f"required ({TOKEN_VARIABLE})" if token else "none: programs on this machine may connect"
        ready = f"Serving {env_id} on {address}, {max_sessions} at a time; token {said}. Clients: env.id={address}"
        http = HTTPServer(build_env_app(server, limits, token), sock, limits, lambda: announce(ready))
        number = 0
        try:
            number = http.run_until_signal()
        finally:
            if not server.close():
                note_hung_thread("an environment", threading.Event())
        return number
