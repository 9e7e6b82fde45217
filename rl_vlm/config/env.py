"""`env`: the environment, or a mixture of several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationInfo,
    field_validator,
    model_serializer,
)

from rl_vlm.config.reward import RewardSection
from rl_vlm.config.section import Section


class EnvPart(Section):
    """What one environment is made from."""

    id: str = Field(
        "Shapes-v0",
        description="A registry id, `package.module:Class`, `path/to/env.py[:Class]`, `verifiers:NAME`, `openenv:URL` or `http://host:port`.",
    )
    data: str | dict[str, str] | None = Field(
        None,
        description="Folder, file or hub name of the data, or one for each of `train` and `test`; passed on as `data`.",
    )
    kwargs: dict[str, Any] = Field(default_factory=dict)
    num_items: int | None = Field(None, ge=1, description="Use only the first items of the training split.")
    reward: RewardSection = RewardSection()

    @field_validator("data", mode="before")
    @classmethod
    def _names_sources(cls, value: Any, info: ValidationInfo) -> Any:
        by_split = isinstance(value, dict) and value.keys() <= {"train", "test"}
        if value is None or isinstance(value, str) or (by_split and all(isinstance(v, str) for v in value.values())):
            return value
        raise ValueError(
            "env.data is a folder, file or hub name, or a mapping such as {train: a.parquet, test: b.parquet}"
        )

    def make_kwargs(self, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The arguments that the environment is made with."""
        data = {"data": self.data} if self.data is not None else {}
        return {**data, **self.kwargs, **(overrides or {})}


class MixtureSection(EnvPart):
    """One environment of a mixture."""

    id: str = Field(description="A registry id, `package.module:Class`, or `path/to/env.py[:Class]`.")
    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,39}$",
        description="Names its metrics, `reward/<name>` and `accuracy/<name>`.",
    )
    weight: float = Field(1.0, ge=0, description="Share of the groups, relative to the other weights.")


class EnvSection(EnvPart):
    """The environment, or a mixture of several in one run."""

    isolation: Literal["thread", "process"] = Field("thread", description="process: a child that can be killed.")
    step_timeout_s: float = Field(60.0, gt=0)
    mixture: tuple[MixtureSection, ...] = Field(
        (), description="Several environments, each with name, id, kwargs, data, weight, num_items and reward."
    )

    def problems(self) -> Iterator[str]:
        """A mixture beside a single environment, and one that cannot be drawn from."""
        if not self.mixture:
            return
        for key in EnvPart.model_fields:
            if key in self.model_fields_set:
                yield f"env.{key} has no effect with env.mixture: set it for each environment of the mixture"
        names = [part.name for part in self.mixture]
        if len(set(names)) < len(names):
            yield f"env.mixture: the names {', '.join(names)} must differ, because metrics are told apart by them"
        if not any(part.weight for part in self.mixture):
            yield "env.mixture: all weights are 0, so that no environment would ever be chosen"

    @model_serializer(mode="wrap")
    def _without_unread(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """With a mixture, leave out the keys of a single environment, because reading them again would be an error."""
        data: dict[str, Any] = handler(self)
        return {key: value for key, value in data.items() if not (self.mixture and key in EnvPart.model_fields)}

    @property
    def parts(self) -> dict[str, EnvPart]:
        """The environments by name; a single one is named by the empty string."""
        return {part.name: part for part in self.mixture} or {"": self}

    @property
    def title(self) -> str:
        """What people call it: the id, or the names of a mixture."""
        return " + ".join(part.name for part in self.mixture) or self.id
