"""Checks the arguments of an environment by the annotations of its constructor. YAML gives any type, and a late TypeError names no key."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, cast, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from rl_vlm.types import UserInputError

# Of pydantic's errors, by type, those whose words speak of Python.
_WORDS = {
    "sequence_str": "a list", "is_instance_of": "a list", "dict_type": "a mapping", "bool_type": "true or false",
    "string_type": "a text", "int_type": "an integer", "float_type": "a number",
}  # fmt: skip
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_arguments(env_id: str, cls: type, arguments: Mapping[str, Any]) -> None:
    """Raise UserInputError, a sentence for each argument that is not of the type that `cls` names for it, or outside its bounds."""
    try:
        _model_of(cls).model_validate(dict(arguments))
    except ValidationError as error:
        raise UserInputError("\n".join(_sentences(env_id, arguments, error))) from error


def _sentences(env_id: str, arguments: Mapping[str, Any], error: ValidationError) -> Iterator[str]:
    """One for each argument, of its first value that is wrong; the members of a union are joined by "or"."""
    wrong: dict[str, dict[str, tuple[list[str], Any]]] = {}
    for one in error.errors():
        key, value = "", cast(Any, arguments)
        for part in one["loc"]:  # of a place in a union pydantic also names the member that it tried, which is no key
            if (isinstance(value, Mapping) and part in value) or (
                isinstance(value, list | tuple) and isinstance(part, int)
            ):
                key, value = f"{key}.{part}", cast(Any, value)[part]
        wanted = _WORDS.get(one["type"], one["msg"].removeprefix("Input should be "))
        wrong.setdefault(str(one["loc"][0]), {}).setdefault(key, ([], one["input"]))[0].append(wanted)
    for keys in wrong.values():
        key, (wanted_of_members, value) = next(iter(keys.items()))
        yield f"{env_id}: env.kwargs{key} must be {' or '.join(wanted_of_members)}, not {value!r:.60}."


@functools.lru_cache(maxsize=64)
def _model_of(cls: type) -> type[BaseModel]:
    hints = get_type_hints(cls.__init__, include_extras=True)  # type: ignore[misc]
    fields: dict[str, Any] = {
        one.name: (hints.get(one.name, Any), ... if one.default is one.empty else one.default)
        for one in inspect.signature(cls).parameters.values()
        if one.kind not in _VARIADIC
    }
    settings = ConfigDict(
        strict=True, extra="allow", allow_inf_nan=False, arbitrary_types_allowed=True, protected_namespaces=()
    )
    return create_model(cls.__name__, __config__=settings, **fields)
