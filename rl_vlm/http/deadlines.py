"""Until when requests must be answered."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rl_vlm.http.errors import RequestError


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

    def too_late(self, seconds: float) -> RequestError:
        """The error of a request whose time is over; it had `seconds`."""
        if self.stopping:
            return RequestError(503, "The server is shutting down: try again later.")
        return RequestError(504, f"No complete answer within {seconds:g} s: ask for less, or later.")
