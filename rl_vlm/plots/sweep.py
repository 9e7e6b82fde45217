"""Draws the settings of a sweep: the metric over iterations, mean and range over the runs of each setting."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.ticker import MaxNLocator

from rl_vlm.plots.curves import combine, draw_band
from rl_vlm.plots.figures import COLORS, MUTED, add_legend, new_figure, save_figure
from rl_vlm.types import UserInputError


def draw_settings(settings: Mapping[str, Sequence[Sequence[tuple[int, float]]]], metric: str, path: Path) -> None:
    """Draw settings by name, each the (iteration, metric) of its runs, best first: the first few in colour with their
    names, the others grey."""
    others = len(settings) - len(COLORS)
    figure, (panel,) = new_figure(note=f"grey: {others} other settings" if others > 0 else "")
    for number, (name, runs) in reversed(list(enumerate(settings.items()))):
        # A run whose curve ends early (it was stopped) is drawn as far as it goes.
        curves = [pd.Series(dict(points)) for points in runs]
        try:
            band = combine(curves)
        except UserInputError:  # no step in common, because one ended at once: the longest alone
            band = combine([max(curves, key=len)])
        named = number < len(COLORS)
        label = f"{name}: {statistics.fmean(points[-1][1] for points in runs):.3f}" if named else ""
        draw_band(panel, band, COLORS[number] if named else MUTED, label)
    panel.set_xlabel("iterations")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.set_ylabel(metric)
    if metric.endswith("/accuracy"):  # of two runs the interval is often wider than a share can be
        panel.set_ylim(-0.02, 1.02)
    add_legend(panel, fontsize=9, reverse=True)
    save_figure(figure, [path])
