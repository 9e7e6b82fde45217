"""rl_vlm: reinforcement learning with vision-language models on Ray."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_vlm.envs.registry import make, register
    from rl_vlm.runs.api import Run, load_run, train

__version__ = "0.1.0"

__all__ = ["Run", "__version__", "load_run", "make", "register", "train"]

_HOMES = {"make": "rl_vlm.envs.registry", "register": "rl_vlm.envs.registry"}
_HOMES |= dict.fromkeys(("train", "load_run", "Run"), "rl_vlm.runs.api")


def __getattr__(name: str) -> Any:
    # On first use: importing environments takes longer than `rl-vlm --help` may.
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
