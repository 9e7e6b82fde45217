"""The `args` of an interactive environment, and the check that it reads every argument of the configuration."""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import sys
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from rl_vlm.types import UserInputError


class Arguments(SimpleNamespace):
    """Settings as attributes, which remembers the names that were read. A copy is a plain SimpleNamespace."""

    __slots__ = ("_reads",)

    def __init__(self, **values: Any) -> None:
        object.__setattr__(self, "_reads", set())
        super().__init__(**values)

    def __getattribute__(self, name: str) -> Any:
        reads: set[str] = object.__getattribute__(self, "_reads")
        if name == "_reads":
            return reads
        values = object.__getattribute__(self, "__dict__")
        reads.update(values if name == "__dict__" else (name,))  # vars(args) hands all of them on
        return object.__getattribute__(self, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return SimpleNamespace, (), vars(self)


def check_all_used(given: Iterable[str], args: Arguments, build: Any, env: object) -> None:
    """Raise UserInputError for a given argument that `build` and the environment that it built do not know.

    Known is what has been read from `args` so far, and every name in the source of the modules that define `build` and
    the environment's classes: those may read an argument later. Without that source nothing is refused.
    """
    modules = {getattr(build, "__module__", ""), *(cls.__module__ for cls in type(env).__mro__)} - {"builtins"}
    sources = [_names_in(module) for module in modules]
    if None in sources:
        return
    known = args._reads.union(*(names for names in sources if names))
    for name in given:
        if name not in known:
            nearest = difflib.get_close_matches(name, {"data", "max_turns", "reward", *args._reads}, n=1, cutoff=0.7)
            raise UserInputError(
                f"The environment {type(env).__name__} reads no argument {name!r}, so it would change nothing: "
                + (f"did you mean {nearest[0]}?" if nearest else "remove it from the arguments.")
            )


@functools.lru_cache(maxsize=64)
def _names_in(module: str) -> frozenset[str] | None:
    """Every identifier, attribute and string constant of a module's source; None without source."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (KeyError, OSError, TypeError, SyntaxError):
        return None
    fields = ("attr", "id", "arg", "value")
    found = (getattr(node, field, None) for node in ast.walk(tree) for field in fields)
    return frozenset(name for name in found if isinstance(name, str))
