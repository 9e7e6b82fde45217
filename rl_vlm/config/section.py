"""The base of all sections of the configuration, and how sections are walked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, NamedTuple, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from rl_vlm.files import resolved

# Values within bounds.
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")]
# Absolute, because other processes have other working directories.
FilePath = Annotated[str, AfterValidator(lambda path: str(resolved(path)))]
Plugin = Annotated[str, AfterValidator(lambda name: str(resolved(name)) if name.endswith(".py") else name)]
Beta = Annotated[float, Field(ge=0, lt=1)]  # of Adam, which rejects other values when a learner starts


class OnlyWith(NamedTuple):
    """Keys that are read only where the key `chooser` beside them has one of `values` (or is set, without values)."""

    keys: tuple[str, ...]
    chooser: str
    values: tuple[Any, ...] = ()


class WrittenFloat(float):
    """A number of YAML that is its own spelling where a text is wanted, such as the name 1e3 or 1.10."""

    spelling = ""

    def __str__(self) -> str:
        return self.spelling


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return float(value) if isinstance(value, float) else value


class Section(BaseModel):
    """Base of all sections: unknown keys are errors, values are not changed after loading."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, coerce_numbers_to_str=True, ser_json_inf_nan="constants"
    )

    place: ClassVar[str] = ""  # the section's name with a point, `serving.`, for messages
    conditional: ClassVar[tuple[OnlyWith, ...]] = ()

    def problems(self) -> Iterator[str]:
        """A sentence, without a line break, on each contradiction between valid values. Keys have their full names."""
        for rule in self.conditional:
            for key in self.changed(*rule.keys) if not self.reads(rule) else ():
                name, values = f"{self.place}{rule.chooser}", " or ".join(map(str, rule.values))
                chosen = getattr(self, rule.chooser)
                now = f"with {name} {'null' if chosen is None else chosen}" if values else f"without {name}"
                instead = f"{name} to {values}" if values else name
                yield f"{self.place}{key} has no effect {now}: remove it, or set {instead}"

    def reads(self, rule: OnlyWith) -> bool:
        chosen = getattr(self, rule.chooser)
        return chosen in rule.values if rule.values else bool(chosen)

    @field_validator("*")
    @classmethod
    def _has_plain_values(cls, value: Any) -> Any:
        return _plain(value)

    @model_validator(mode="after")
    def _has_no_problems(self) -> Self:
        if sentences := list(self.problems()):
            raise ValueError("\n".join(sentences))
        return self

    def changed(self, *keys: str) -> Iterator[str]:
        """The keys that differ from their default: a saved configuration holds the defaults of all keys."""
        for key in keys:
            default = type(self).model_fields[key].get_default(call_default_factory=True)
            if getattr(self, key) not in (None, default):
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
