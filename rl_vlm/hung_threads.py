"""Ends a process in which a thread hangs: Python would wait for it, and a job would not end after its results are written."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

_hung: list[str] = []


def note_hung_thread(what: str) -> None:
    """A thread of this process is in a call that did not end within its deadline."""
    _hung.append(what)


def leave(code: int) -> NoReturn:
    """End the process with this code; at once where a thread hangs, else as Python ends."""
    if not _hung:
        sys.exit(code)
    print(f"rl-vlm: {_hung[0]} still hangs; it is left behind.", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
