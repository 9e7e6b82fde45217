"""Runs the application in uvicorn: binds the port early, and drains on SIGINT and SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from rl_vlm.config import HTTPSection
from rl_vlm.http.connections import ConnectionGuard, ConnectionLimits
from rl_vlm.http.gate import LOOPBACK, Gate
from rl_vlm.types import UserInputError

TOKEN_VARIABLE = "RL_VLM_API_TOKEN"
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
            f"Listening on {host} lets other machines in: set {TOKEN_VARIABLE} to a secret token, or listen on 127.0.0.1."
        )


def bind(host: str, port: int) -> socket.socket:
    """Bind the address, so that a wrong one is an error before the model is loaded. Port 0 is any free port. Raises UserInputError."""
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
        """Reject new requests and let running ones end; a second call does not wait for them. Call it on the server's event loop."""
        if self._draining is not None:
            self._server.force_exit = self._server.should_exit = True
            return
        self._app.drain()
        self._draining = asyncio.ensure_future(self._drained())

    async def _drained(self) -> None:
        """Keep listening while requests run, so that new clients get a 503 with Retry-After; uvicorn would close the port at once."""
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
