"""Imports that overlap with waiting: the large libraries load while Ray starts its processes."""

from __future__ import annotations

import importlib
import threading
from contextlib import suppress


def import_meanwhile(*modules: str) -> threading.Thread:
    """Import modules in a thread and return it; an `import` of the same module elsewhere waits until it is there.

    What cannot be imported is left to that `import` to report. Not for modules that start processes: Linux ends those with
    the thread that started them.
    """

    def load() -> None:
        for module in modules:
            with suppress(Exception):
                importlib.import_module(module)

    thread = threading.Thread(target=load, name="imports", daemon=True)
    thread.start()
    return thread
