"""An environment on another machine, or in another process, over HTTP: `RemoteEnv("http://host:port")`.

The other side is `rl-vlm envs serve ID` (see `http/env_server.py`). Requests and replies are frames (see `frames`).
Every request has a number, and one that arrives again is answered as before: a connection that breaks may be opened
again without a step being made twice.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import httpx

from rl_vlm.envs.address import TOKEN_VARIABLE, base_url, is_loopback, token_header, wrong_token
from rl_vlm.envs.base import Seconds
from rl_vlm.envs.errors import EnvCrashError, EnvError, EnvTimeoutError, check_metrics
from rl_vlm.envs.images import BadImageError, decode
from rl_vlm.envs.isolation import EnvClient, EnvLostError, raise_error, unpack_observation
from rl_vlm.frames import Frame, FrameError, pack_frame, unpack_frame
from rl_vlm.safe_text import excerpt
from rl_vlm.types import Observation, Split, UserInputError
from rl_vlm.waiting import retried

MAX_REPLY = 64 * 2**20
MAX_IMAGES = 64  # of one observation
FRAME = "application/x-rl-vlm-frame"
_CLOSE_S = 2.0  # that the end of a session is waited for
_BUSY = (408, 429, 502, 503)  # the server, or a proxy before it, will answer later


class RemoteEnv(EnvClient):
    """A VisionEnv behind an HTTP address. Each instance has a session, an environment of its own on the server.

    timeout_s: deadline of one call of the environment. retry_s: how long a server that cannot be reached, or has no
    session free, is tried again. token_variable: the environment variable with the token.

    Raises EnvTimeoutError after `timeout_s`, EnvCrashError if the server, or the session on it, is gone (`reset` then
    opens another one), EnvError for the environment's own failures, UserInputError for a wrong address or token.
    """

    def __init__(
        self, address: str, *, timeout_s: Seconds = 60.0, retry_s: Seconds = 30.0, token_variable: str = TOKEN_VARIABLE
    ) -> None:
        self._url = base_url(address)
        self._timeout_s, self._retry_s = timeout_s, retry_s
        headers = {"Content-Type": FRAME, **token_header(token_variable)}
        self._http = httpx.Client(headers=headers, trust_env=not is_loopback(self._url))
        self._session: str | None = None
        self._number = 0
        self._sizes: dict[str, int | None] = {}
        self._open()

    def num_items(self, split: Split) -> int | None:
        return self._sizes[split]

    def close(self) -> None:
        if self._session is not None:
            self._end_session()
        self._http.close()

    def _end_session(self) -> None:
        """Forget the session, and let the server, if it answers, close the environment."""
        request, self._session = {"op": "close", "session": self._session}, None
        with suppress(EnvError, UserInputError, httpx.TransportError):
            self._send(pack_frame(request, []), min(_CLOSE_S, self._timeout_s))

    def _open(self) -> None:
        reply, _ = self._post({"op": "open"}, self._retry_s)
        raise_error(reply, f"{self._url}: open")
        self._session, self._number, self._sizes = str(reply["session"]), 0, dict(reply["num_items"])
        # Of the server's environment; a server of an earlier version does not send them.
        self.metrics = check_metrics(reply.get("metrics", {}))  # type: ignore[misc]

    def _ask(self, request: dict[str, Any]) -> Frame:
        if self._session is None:
            raise EnvLostError(f"{self._url}: the session is gone; call reset() for a new one.")
        self._number += 1
        try:
            reply = self._post({**request, "session": self._session, "number": self._number}, self._retry_s)
        except EnvLostError:
            self._session = None
            raise
        except (EnvTimeoutError, EnvCrashError):
            self._end_session()  # whether the call was carried out is not known
            raise
        raise_error(reply[0], f"{self._url}: {request['op']}")
        return reply

    def _observation(self, reply: dict[str, Any], blobs: list[bytes]) -> Observation:
        """Its images decoded and encoded again: they come from elsewhere."""
        if len(blobs) > MAX_IMAGES:
            raise EnvError(f"An observation has {len(blobs)} images, more than {MAX_IMAGES}.")
        try:
            return unpack_observation(reply, blobs, decode)
        except (FrameError, BadImageError) as error:
            raise EnvError(f"The server sent an observation that cannot be read: {error}.") from error

    def _post(self, request: dict[str, Any], retry_s: float) -> Frame:
        body, what = pack_frame(request, []), f"{self._url}: {request['op']}"

        def ask() -> Frame:
            try:
                status, data = self._send(body, self._timeout_s)
            except httpx.ReadTimeout as error:
                raise EnvTimeoutError(f"{what} took longer than {self._timeout_s:g} s.") from error
            except httpx.TransportError as error:
                why = excerpt(f"{type(error).__name__}: {error}", 300)
                raise _UnansweredError(
                    f"{self._url} could not be reached ({why}): is `rl-vlm envs serve` running there?"
                ) from error
            if status == 200:
                try:
                    return unpack_frame(data)
                except FrameError as error:
                    raise EnvCrashError(f"{self._url} does not answer as an environment does ({error}).") from error
            why = excerpt(data[:5000].decode(errors="replace"), 300)
            if status in (401, 403):
                raise wrong_token(self._url, why)
            if status == 410:
                raise EnvLostError(f"{self._url}: the session is gone; call reset() for a new one.")
            if status in _BUSY:
                raise _UnansweredError(
                    f"{self._url} is busy ({why}): where its clients need more environments at once than it has, start "
                    "`rl-vlm envs serve` with a larger --max-sessions."
                )
            raise EnvCrashError(f"{self._url} answered with status {status} ({why}).")

        return retried(ask, (_UnansweredError,), retry_s)

    def _send(self, body: bytes, timeout_s: float) -> tuple[int, bytes]:
        timeout = httpx.Timeout(timeout_s, connect=min(10.0, timeout_s))
        with self._http.stream("POST", f"{self._url}/env", content=body, timeout=timeout) as response:
            pieces, size = [], 0
            for piece in response.iter_bytes():
                size += len(piece)
                if size > MAX_REPLY:
                    raise EnvError(f"{self._url} sent more than {MAX_REPLY} bytes.")
                pieces.append(piece)
            return response.status_code, b"".join(pieces)


class _UnansweredError(EnvCrashError):
    """The server may answer later."""
