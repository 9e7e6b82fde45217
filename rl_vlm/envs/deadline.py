"""A deadline for code of others in the main thread: what hangs in Python or in a system call is interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_AGAIN_S = 1.0  # code that catches the interruption is interrupted again


class DeadlineError(BaseException):
    """The deadline has passed. No Exception, because code of others catches these."""


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Raise DeadlineError inside the block once `seconds` have passed; in another thread than the main one there is no deadline."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise DeadlineError

    before = signal.signal(signal.SIGALRM, interrupt)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, before)
