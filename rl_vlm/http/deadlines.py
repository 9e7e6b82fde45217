"""When requests must be answered: each by its own deadline, and all of them soon once the server stops."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rl_vlm.http.errors import RequestError


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
