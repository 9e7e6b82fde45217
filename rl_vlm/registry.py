"""Registries: map the names that a configuration may use to objects. Users add their own from plugins."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import NoReturn, TypeVar

from rl_vlm.types import UserInputError

T = TypeVar("T")


@functools.cache  # it reads the metadata of all packages, and each environment that is made asks
def provided(group: str) -> dict[str, EntryPoint]:
    """What installed packages, this one included, provide in an entry-point group, by name."""
    return {point.name: point for point in entry_points(group=group)}


class Registry(dict[str, T]):
    """Maps the names that the configuration key `key` (dotted) accepts to objects. An unknown name raises
    UserInputError, which lists the known ones."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self._key = key

    def register(self, name: str) -> Callable[[T], T]:
        """Make an entry known under a name. A second one replaces the first, as when a plugin is reloaded."""

        def remember(entry: T) -> T:
            self[name] = entry
            return entry

        return remember

    def __missing__(self, name: str) -> NoReturn:
        near = difflib.get_close_matches(name, self, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UserInputError(
            f"{self._key}: {name!r} is not known; there are {', '.join(sorted(self))}.{hint} "
            "What you registered yourself must be in a module or file that `plugins` names."
        )
