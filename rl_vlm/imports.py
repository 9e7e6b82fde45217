"""Imports in a background thread, and temporary replacement of names in libraries that have no setting for it."""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

logger = logging.getLogger(__name__)
_threads: list[threading.Thread] = []  # of import_meanwhile, in the order of their starts


def import_meanwhile(*modules: str) -> None:
    """Import modules in a thread, after those of earlier calls; see `imports_done`.

    What cannot be imported is left to that `import` to report. Not for modules that start processes: Linux ends those
    with the thread that started them.
    """

    earlier = list(_threads)

    def load() -> None:
        for thread in earlier:
            thread.join()
        for module in modules:
            try:
                importlib.import_module(module)
            except Exception as error:  # a broken library may raise anything; the `import` that needs it will too
                logger.debug("importing %s ahead failed: %s", module, error)

    thread = threading.Thread(target=load, name="imports", daemon=True)
    _threads.append(thread)
    thread.start()


def imports_done() -> None:
    """Wait for what `import_meanwhile` imports. To be called before the first `import` of the same packages.

    Two threads that import one package wait for each other module by module; where its modules import each other, as
    peft's do, Python breaks the circle by giving one of them a module that is not complete, and it fails.
    """
    while _threads:
        _threads.pop().join()


@contextmanager
def replaced(module: ModuleType, name: str, value: object) -> Iterator[None]:
    """Inside this context, `module.name` is `value`."""
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)
