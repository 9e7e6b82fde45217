"""The base of all sections of the configuration, and how sections are walked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

Beta = Annotated[float, Field(ge=0, lt=1)]  # of Adam, which rejects other values when a learner starts


class Problems(ValueError):
    """What is wrong with one section: a sentence each."""

    def __init__(self, sentences: Iterable[str]) -> None:
        self.sentences = list(sentences)
        super().__init__("; ".join(self.sentences))


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are not changed after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    def problems(self) -> Iterator[str]:
        """A sentence on each contradiction between values that are valid by themselves. Keys have their full dotted names."""
        yield from ()

    @model_validator(mode="after")
    def _has_no_problems(self) -> Self:
        if sentences := list(self.problems()):
            raise Problems(sentences)
        return self

    def changed(self, *keys: str) -> Iterator[str]:
        """Those of the keys whose value is not the default. A saved configuration holds the defaults of all keys."""
        for key in keys:
            if getattr(self, key) != type(self).model_fields[key].get_default(call_default_factory=True):
                yield key


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
