"""`env`: the environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from rl_vlm.config.section import Section


class EnvSection(Section):
    """The environment."""

    id: str = Field("Shapes-v0", description="A registry id, `package.module:Class`, or `path/to/env.py[:Class]`.")
    data: str | None = Field(
        None, description="Folder, file or hub name of the data; passed to the environment as `data`."
    )
    kwargs: dict[str, Any] = Field(default_factory=dict)
    isolation: Literal["thread", "process"] = Field("thread", description="process: a child that can be killed.")
    step_timeout_s: float = Field(60.0, gt=0)
    num_items: int | None = Field(None, ge=1, description="Use only the first items of the training split.")

    def make_kwargs(self, overrides: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The arguments that the environment is made with."""
        data = {"data": self.data} if self.data is not None else {}
        return {**data, **self.kwargs, **(overrides or {})}
