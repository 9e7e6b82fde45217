"""SIGINT and SIGTERM while a command starts something that does not run yet, or ends it: it says so, and leaves."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_caught: list[int] = []


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """Inside this context a signal is told on stderr, and the context ends with SystemExit and its exit code, 130 or 143."""
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    _caught.clear()
    leave_on_signals()
    try:
        yield
    except BaseException:
        if (
            _caught
        ):  # Ray makes an exit code 1 of any that it meets in a call of its own, and what is half started fails
            raise SystemExit(128 + _caught[0]) from None
        raise
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def leave_on_signals() -> None:
    """Put the handlers of `leaving_on_signals` back in place, after somebody else's."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)


def _leave(number: int, _: FrameType | None) -> None:
    _caught.append(number)
    print(f"Interrupted by {signal.Signals(number).name}: ending what was started.", file=sys.stderr, flush=True)
    sys.exit(128 + number)
