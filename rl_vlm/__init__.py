"""rl_vlm: reinforcement learning with vision-language models on Ray."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_vlm.envs.registry import make, register

__version__ = "0.1.0"

__all__ = ["__version__", "make", "register"]


def __getattr__(name: str) -> Any:
    # On first use: importing environments takes longer than `rl-vlm --help` may.
    if name in ("make", "register"):
        from rl_vlm.envs import registry

        return getattr(registry, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
