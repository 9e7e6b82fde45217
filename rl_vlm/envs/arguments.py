"""Checks the arguments of an environment against the annotations of its class, and says in words what is wrong."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from rl_vlm.types import UserInputError

# Of pydantic's errors, by type, those whose words speak of Python.
_WORDS = {
    "sequence_str": "a list", "is_instance_of": "a list", "dict_type": "a mapping", "bool_type": "true or false",
    "string_type": "a text", "int_type": "an integer", "float_type": "a number",
}  # fmt: skip
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def check_arguments(env_id: str, factory: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    """Raise UserInputError if `factory` does not take these arguments, or not with these values."""
    signature = inspect.signature(factory)
    try:
        signature.bind(**kwargs)
    except TypeError as error:
        correct = "correct env.kwargs, or --env-arg"
        if "data" in kwargs and "data" not in signature.parameters:
            correct = "leave env.data out, or set env.id to an environment that reads data, such as QA-v0"
        raise UserInputError(
            f"Environment {env_id} does not take these arguments ({error}): {correct}. It takes "
            f"{', '.join(signature.parameters) or 'none'}."
        ) from error
    cls = getattr(factory, "func", factory)  # an adapter's class, whose first argument is what the id names
    if isinstance(cls, type) and cls.__module__.startswith("rl_vlm."):  # others' annotations may be loose
        names = tuple(one.name for one in signature.parameters.values() if one.kind not in _VARIADIC)
        try:
            _model_of(cls, names).model_validate(kwargs)
        except ValidationError as error:
            raise UserInputError("\n".join(_sentences(env_id, error))) from error


def _sentences(env_id: str, error: ValidationError) -> Iterator[str]:
    """A sentence for each argument of another type or out of bounds; what members of a union want is joined by "or"."""
    for name, found in itertools.groupby(error.errors(), key=lambda one: one["loc"][0]):
        first, *others = found
        wanted = [_WORDS.get(one["type"], one["msg"].removeprefix("Input should be ")) for one in (first, *others)]
        yield f"{env_id}: env.kwargs.{name} must be {' or '.join(wanted)}, not {first['input']!r:.60}."


@functools.lru_cache(maxsize=64)
def _model_of(cls: type, names: tuple[str, ...]) -> type[BaseModel]:
    hints = get_type_hints(cls.__init__, include_extras=True)  # type: ignore[misc]
    defaults = {name: one.default for name, one in inspect.signature(cls).parameters.items()}
    fields: dict[str, Any] = {
        name: (hints.get(name, Any), ... if defaults[name] is inspect.Parameter.empty else defaults[name])
        for name in names
    }
    settings = ConfigDict(
        strict=True, extra="allow", allow_inf_nan=False, arbitrary_types_allowed=True, protected_namespaces=()
    )
    return create_model(cls.__name__, __config__=settings, **fields)
