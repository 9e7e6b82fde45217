"""The base of all sections of the configuration, and how sections are walked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, get_args

from pydantic import BaseModel, ConfigDict, Field

Beta = Annotated[float, Field(ge=0, lt=1)]  # of Adam, which refuses others when a learner starts


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are not changed after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def section_of(annotation: Any) -> type[Section] | None:
    """The section that a field holds, perhaps optionally; None for a field that holds a value."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def keys_of(section: type[Section], prefix: str = "") -> Iterator[str]:
    """The dotted names of all keys, those of sections before what is in them."""
    for name, field in section.model_fields.items():
        yield prefix + name
        inner = section_of(field.annotation)
        if inner is not None:
            yield from keys_of(inner, f"{prefix}{name}.")
