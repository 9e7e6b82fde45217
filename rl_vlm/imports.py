"""Imports in a background thread, and temporary replacement of names in libraries that have no setting for it."""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

logger = logging.getLogger(__name__)


def import_meanwhile(*modules: str) -> threading.Thread:
    """Import modules in a thread and return it; an `import` of the same module elsewhere waits until it is there.

    What cannot be imported is left to that `import` to report. Not for modules that start processes: Linux ends those with
    the thread that started them.
    """

    def load() -> None:
        for module in modules:
            try:
                importlib.import_module(module)
            except Exception as error:  # a broken library may raise anything; the `import` that needs it will too
                logger.debug("importing %s ahead failed: %s", module, error)

    thread = threading.Thread(target=load, name="imports", daemon=True)
    thread.start()
    return thread


@contextmanager
def replaced(module: ModuleType, name: str, value: object) -> Iterator[None]:
    """Inside this context, `module.name` is `value`."""
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)
