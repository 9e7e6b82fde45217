"""Built-in models: names that `model.path` takes besides folders and names of the hub.

An installed package provides them through the entry-point group `rl_vlm.models`: each entry is a mapping from names to
`BuiltinModel`.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Protocol

from rl_vlm.registry import provided

ENTRY_POINT_GROUP = "rl_vlm.models"


class BuiltinModel(Protocol):
    """A small model that code builds on the machine that needs it."""

    def folder(self, seed: int = 0) -> Path:
        """Its Hugging Face folder in the cache, built on first use."""
        ...

    def config(self) -> dict[str, Any]:
        """The content of its config.json, without building it."""
        ...

    def make(self, folder: Path, seed: int = 0) -> Path:
        """Build it into a folder, which appears complete or not at all."""
        ...


@functools.cache
def builtin_models() -> dict[str, BuiltinModel]:
    """The built-in models of all installed packages by name."""
    return {name: model for point in provided(ENTRY_POINT_GROUP).values() for name, model in point.load().items()}
