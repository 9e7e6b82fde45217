"""Figures that environments declare: means and quantiles of numbers in the `info` of their episodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from rl_vlm.types import TrajectoryGroup

Metrics = Mapping[str, tuple[float, ...]]  # VisionEnv.metrics: name of an info key -> its quantiles


class HasInfo(Protocol):
    """An episode, whole or what was kept of it."""

    @property
    def info(self) -> dict[str, Any]: ...


def group_figures(metrics: Mapping[str, Metrics], groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """`declared_figures` of each environment by name; those of a mixture end in `/<name>`."""
    figures: dict[str, float] = {}
    for env, declared in metrics.items():
        own = [trajectory for group in groups if group.env == env for trajectory in group.trajectories]
        found = declared_figures(declared, own)
        figures |= {f"{key}/{env}": value for key, value in found.items()} if env else found
    return figures


def declared_figures(metrics: Metrics, trajectories: Iterable[HasInfo]) -> dict[str, float]:
    """`env/<name>` for each of `VisionEnv.metrics`, its mean over the episodes that have it, and `env/<name>_p50` per quantile."""
    infos = [trajectory.info for trajectory in trajectories]
    figures: dict[str, float] = {}
    for name, quantiles in metrics.items():
        values = [float(info[name]) for info in infos if isinstance(info.get(name), (bool, int, float))]
        if not values:
            continue
        figures[f"env/{name}"] = float(np.mean(values))
        for quantile in quantiles:
            figures[f"env/{name}_p{round(100 * quantile)}"] = float(np.quantile(values, quantile))
    return figures
