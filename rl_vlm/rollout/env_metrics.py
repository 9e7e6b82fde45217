"""Figures that environments declare: means and quantiles of numbers in the `info` of their episodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from rl_vlm.types import Trajectory


def env_figures(metrics: Mapping[str, tuple[float, ...]], trajectories: Iterable[Trajectory]) -> dict[str, float]:
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
