"""How many pixels are decoded at a time: decoded, an image takes a thousand times its file."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rl_vlm.http.errors import RequestError


class PixelRoom:
    """At most `capacity` pixels are in work, on any threads. A larger image is alone."""

    def __init__(self, capacity: int) -> None:
        self._capacity = self._left = capacity
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, pixels: int, timeout_s: float) -> Iterator[None]:
        """In this context the image may be decoded. Raises RequestError where others take too long."""
        pixels = min(pixels, self._capacity)
        ends = time.monotonic() + timeout_s
        with self._changed:
            if not self._changed.wait_for(lambda: pixels <= self._left, ends - time.monotonic()):
                raise RequestError(503, "Too many images are being decoded: try again later.")
            self._left -= pixels
        try:
            yield
        finally:
            with self._changed:
                self._left += pixels
                self._changed.notify_all()
