"""Metrics that environments declare: means and quantiles of numbers in the `info` of their episodes."""

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


def group_metrics(declared: Mapping[str, Metrics], groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """`declared_metrics` of each environment by name; those of a mixture end in `/<name>`."""
    metrics: dict[str, float] = {}
    for env, own in declared.items():
        values = declared_metrics(own, [one for group in groups if group.env == env for one in group.trajectories])
        metrics |= {f"{key}/{env}": value for key, value in values.items()} if env else values
    return metrics


def declared_metrics(declared: Metrics, trajectories: Iterable[HasInfo]) -> dict[str, float]:
    """`env/<name>` for each of `VisionEnv.metrics`, its mean over the episodes that have it, and `env/<name>_p50` per quantile."""
    infos = [trajectory.info for trajectory in trajectories]
    metrics: dict[str, float] = {}
    for name, quantiles in declared.items():
        values = [float(info[name]) for info in infos if isinstance(info.get(name), (bool, int, float))]
        if not values:
            continue
        metrics[f"env/{name}"] = float(np.mean(values))
        for quantile in quantiles:
            metrics[f"env/{name}_p{round(100 * quantile)}"] = float(np.quantile(values, quantile))
    return metrics
