"""The environments of a configuration: a single one, or those of a mixture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_vlm.config import EnvSection
from rl_vlm.envs.base import VisionEnv
from rl_vlm.envs.registry import make
from rl_vlm.types import Split


def make_part(env: EnvSection, name: str = "", changes: Mapping[str, Any] | None = None) -> VisionEnv:
    """One environment of `env.parts`, with changed arguments, in this process."""
    part = env.parts[name]
    return make(part.id, **part.make_kwargs(changes))


def split_sizes(env: EnvSection, split: Split) -> dict[str, int | None]:
    """The number of items in a split of each environment by name; None for items without end.

    Of the training split at most `num_items`, which may also bound an endless one.
    """
    sizes: dict[str, int | None] = {}
    for name, part in env.parts.items():
        one = make_part(env, name)
        sizes[name] = (part.num_items if split == "train" else None) or one.num_items(split)
        one.close()
    return sizes


def declared_metrics(env: EnvSection) -> dict[str, Mapping[str, tuple[float, ...]]]:
    """`VisionEnv.metrics` of each environment by name."""
    metrics: dict[str, Mapping[str, tuple[float, ...]]] = {}
    for name in env.parts:
        one = make_part(env, name)
        metrics[name] = one.metrics
        one.close()
    return metrics
