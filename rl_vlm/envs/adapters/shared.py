"""One foreign environment for all episodes of a process, where its interface keeps an episode's state outside of it."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

_LOCK = threading.Lock()
_SHARED: WeakValueDictionary[Any, SharedEnv] = WeakValueDictionary()


class SharedEnv:
    """An environment that is made once, with its data, for all who ask with the same key.

    `open` resets it in turn, so what it counts over its episodes goes on. It returns with the result a shallow copy that
    the episode's steps are made on: they may run at once and write to the copy, and the data are not copied.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._env: Any = None
        self._copied = True

    @classmethod
    def of(cls, key: Any, make: Callable[[], Any]) -> SharedEnv:
        """The one of this key; made by the first who asks, while the others wait."""
        with _LOCK:
            found = _SHARED.get(key)
            if found is None:
                found = _SHARED[key] = cls()
        with found._lock:
            if found._env is None:
                found._env = make()
        return found

    @classmethod
    def own(cls, make: Callable[[], Any]) -> SharedEnv:
        """One that nobody else gets, and that is stepped itself."""
        found = cls()
        found._env, found._copied = make(), False
        return found

    @property
    def env(self) -> Any:
        """The environment itself."""
        return self._env

    def open(self, reset: Callable[[Any], Any]) -> tuple[Any, Any]:
        """(what `reset` returned for the environment, the environment that the episode steps)."""
        with self._lock:
            result = reset(self._env)
            return result, copy.copy(self._env) if self._copied else self._env


def forget_shared() -> None:
    """Let the next who asks get a new one; who has one keeps it."""
    with _LOCK:
        _SHARED.clear()
