"""`env`: the environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, field_validator

from rl_vlm.config.section import Section


class EnvSection(Section):
    """The environment."""

    id: str = Field(
        "Shapes-v0",
        description="A registry id, `package.module:Class`, `path/to/env.py[:Class]`, `verifiers:NAME`, `openenv:URL` or `http://host:port`.",
    )
    data: str | dict[str, str] | None = Field(
        None,
        description="Folder, file or hub name of the data, or one for each of `train` and `test`; passed on as `data`.",
    )
    kwargs: dict[str, Any] = Field(default_factory=dict)
    isolation: Literal["thread", "process"] = Field("thread", description="process: a child that can be killed.")
    step_timeout_s: float = Field(60.0, gt=0)
    num_items: int | None = Field(None, ge=1, description="Use only the first items of the training split.")

    @field_validator("data", mode="before")
    @classmethod
    def _names_sources(cls, value: Any) -> Any:
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
