"""Registries: map the names that a configuration may use to objects. Users add their own from plugins."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from rl_vlm.types import UserInputError

T = TypeVar("T")


def provided(group: str) -> dict[str, EntryPoint]:
    """What installed packages, this one included, provide in an entry-point group, by name."""
    return {point.name: point for point in entry_points(group=group)}


class Registry(Generic[T]):
    """Maps the names that one configuration key accepts to objects; `key` is for error messages."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Make an entry known under a name; a second one replaces the first, as when a plugin is reloaded."""

        def remember(entry: T) -> T:
            self._entries[name] = entry
            return entry

        return remember

    def get(self, name: str) -> T:
        """The entry of a name. Raises UserInputError that lists the known names."""
        if name in self._entries:
            return self._entries[name]
        near = difflib.get_close_matches(name, self._entries, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UserInputError(
            f"{self._key}: {name!r} is not known; there are {', '.join(self.names())}.{hint} "
            "What you registered yourself must be in a module or file that `plugins` names."
        )

    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._entries))
