"""Ends a process in which a thread hangs: Python would wait for it, and a job would not end after its results are written."""

from __future__ import annotations

import os
import sys
import threading
from typing import NoReturn

_calls: list[tuple[str, threading.Event]] = []


def note_hung_thread(what: str, ended: threading.Event) -> None:
    """A thread of this process is in a call that did not end within its deadline; `ended` is set if it ends after all."""
    _calls.append((what, ended))


def leave(code: int) -> NoReturn:
    """End the process with this code; at once where a thread hangs, else as Python ends."""
    hung = [what for what, ended in _calls if not ended.is_set()]
    if not hung:
        sys.exit(code)
    print(f"rl-vlm: {hung[0]} still hangs; it is left behind.", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
