"""The environments of a configuration: a single one, or those of a mixture."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_vlm.config import EnvPart, EnvSection
from rl_vlm.envs.base import VisionEnv
from rl_vlm.envs.registry import make
from rl_vlm.types import Split


def make_part(env: EnvSection, name: str = "", changes: Mapping[str, Any] | None = None) -> VisionEnv:
    """One environment of `env.parts`, with changed arguments, in this process."""
    part = env.parts[name]
    return make(part.id, **part.make_kwargs(changes))


@dataclass(frozen=True, slots=True)
class Survey:
    """The number of items by split and name of the environment (None without end), and `VisionEnv.metrics` by name."""

    sizes: dict[Split, dict[str, int | None]]
    metrics: dict[str, Mapping[str, tuple[float, ...]]]


def survey(env: EnvSection, *splits: Split) -> Survey:
    """Open each environment once, and note what is asked of it in these splits."""
    found = Survey({split: {} for split in splits}, {})
    for name, part in env.parts.items():
        one = make_part(env, name)
        for split in splits:
            found.sizes[split][name] = part_size(part, one, split)
        found.metrics[name] = one.metrics
        one.close()
    return found


def part_size(part: EnvPart, env: VisionEnv, split: Split) -> int | None:
    """The number of items in a split; of the training split at most `num_items`, which may also bound an endless one."""
    size = env.num_items(split)
    return train_size(part, size) if split == "train" else size


def train_size(part: EnvPart, size: int | None) -> int | None:
    """The number of training items of an environment that has `size` of them, or endless ones (None)."""
    return min((count for count in (part.num_items, size) if count is not None), default=None)
