"""Draws the settings of a sweep: the metric over iterations, mean and range over the runs of each setting."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from matplotlib.ticker import MaxNLocator

from rl_vlm.plots.curves import COLORS, MUTED, add_legend, combine, draw_band, new_figure, save_figure
from rl_vlm.types import UserInputError


@dataclass(frozen=True, slots=True)
class Setting:
    """The runs of one setting: (iteration, metric) of each, and their last values."""

    name: str
    runs: tuple[Sequence[tuple[int, float]], ...]
    last: tuple[float, ...]


def draw_settings(settings: Sequence[Setting], metric: str, path: Path) -> None:
    """Draw the settings, best first: the first few in colour with their names, the others grey."""
    others = len(settings) - len(COLORS)
    figure, (panel,) = new_figure(note=f"grey: {others} other settings" if others > 0 else "")
    for number, setting in reversed(list(enumerate(settings))):
        # A run whose curve ends early (it was stopped) is drawn as far as it goes.
        curves = [pd.Series(dict(points)) for points in setting.runs]
        try:
            band = combine(curves)
        except UserInputError:  # no step in common, because one ended at once: the longest alone
            band = combine([max(curves, key=len)])
        named = number < len(COLORS)
        label = f"{setting.name}: {statistics.fmean(setting.last):.3f}" if named else ""
        draw_band(panel, band, COLORS[number] if named else MUTED, label)
    panel.set_xlabel("iterations")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.set_ylabel(metric)
    add_legend(panel, fontsize=9, reverse=True)
    save_figure(figure, [path])
