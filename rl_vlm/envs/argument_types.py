"""Whether arguments have the types that an environment's constructor names. YAML gives any, and a late TypeError names no key."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from rl_vlm.types import UserInputError

# One of them, and several.
_WORDS: dict[Any, tuple[str, str]] = {
    bool: ("true or false", "true or false"),
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("a text", "texts"),
    NoneType: ("null", "null"),
}


def check_types(env_id: str, cls: type, arguments: Mapping[str, Any]) -> None:
    """Raise UserInputError for an argument that is not of the type that `cls` names for it; what it names no type for is not checked."""
    hints = _hints_of(cls)
    for name, value in arguments.items():
        hint = hints.get(name, Any)
        if not _fits(value, hint):
            raise UserInputError(f"{env_id}: env.kwargs.{name} must be {_words(hint)}, not {value!r:.60}.")


@functools.lru_cache(maxsize=64)
def _hints_of(cls: type) -> dict[str, Any]:
    return get_type_hints(cls.__init__)  # type: ignore[misc]


def _fits(value: Any, hint: Any) -> bool:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is Literal:
        return any(isinstance(value, type(one)) and value == one for one in inner)
    if origin is Mapping:
        keys, values = inner
        return isinstance(value, Mapping) and all(_fits(key, keys) and _fits(one, values) for key, one in value.items())
    if origin in (Sequence, list, tuple):
        return isinstance(value, list | tuple) and all(_fits(one, inner[0]) for one in value)
    if isinstance(value, bool) and hint in _WORDS:
        return hint is bool  # which is an int to Python
    if hint is float:  # not nan, infinity or what no float holds
        return isinstance(value, int | float) and abs(value) <= sys.float_info.max
    return isinstance(value, hint) if hint in _WORDS else True


def _words(hint: Any, several: bool = False) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_words(one, several) for one in inner))
    if origin is Literal:
        return f"{'some' if several else 'one'} of {', '.join(map(str, inner))}"
    if origin is Mapping:
        return f"a mapping from {_words(inner[0], True)} to {_words(inner[1], True)}"
    if origin in (Sequence, list, tuple):
        return f"{'lists' if several else 'a list'} of {_words(inner[0], True)}"
    return _WORDS.get(hint, ("anything", "anything"))[several]
