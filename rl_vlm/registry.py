"""Registries: map the names that a configuration may use to objects. Users add their own from plugins."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NoReturn, TypeVar

from rl_vlm.types import UserInputError

T = TypeVar("T")


@functools.cache  # it reads the metadata of all packages, and each environment that is made asks
def provided(group: str) -> dict[str, EntryPoint]:
    """What installed packages, this one included, provide in an entry-point group, by name."""
    return {point.name: point for point in entry_points(group=group)}


def suggestion(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """A sentence with the known name that is most like this one, with a blank before it; "" if none is."""
    near = difflib.get_close_matches(name, [*known], n=1, cutoff=cutoff)
    return f" Did you mean {near[0]}?" if near else ""


@functools.cache
def builtin_models() -> dict[str, Any]:
    """The built-in models of all installed packages by name, which `model.path` then takes.

    Each entry point of the group rl_vlm.models maps names to objects with `folder(seed)` (the model's folder in the
    cache, built on first use), `config()` (its config.json, without building it) and `make(folder, seed)` (build it).
    """
    return {name: model for point in provided("rl_vlm.models").values() for name, model in point.load().items()}


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
        raise UserInputError(
            f"{self._key}: {name!r} is not known; there are {', '.join(sorted(self))}.{suggestion(name, self)} "
            "What you registered yourself must be in a module or file that `plugins` names."
        )
