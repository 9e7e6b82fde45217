"""Imports in a background thread, and temporary replacement of names in libraries that have no setting for it."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import ModuleType

_threads: list[threading.Thread] = []  # of import_meanwhile, in the order of their starts


def import_meanwhile(*modules: str) -> None:
    """Import modules in a thread, after those of earlier calls. Not any that start processes, which end with it."""

    earlier = list(_threads)

    def load() -> None:
        for thread in earlier:
            thread.join()
        for module in modules:
            with suppress(Exception):  # a broken library may raise anything; the `import` that needs it will too
                importlib.import_module(module)

    thread = threading.Thread(target=load, name="imports", daemon=True)
    _threads.append(thread)
    thread.start()


def imports_done() -> None:
    """Wait for `import_meanwhile`, before the first `import` of the same packages: two threads in one package's
    circular imports make one of them fail."""
    while _threads:
        _threads.pop().join()


@contextmanager
def replaced(module: ModuleType, name: str, value: object) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)
