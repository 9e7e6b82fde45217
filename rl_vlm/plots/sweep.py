"""Draws the settings of a sweep: the metric over iterations, mean and range over the runs of each setting."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.ticker import MaxNLocator

from rl_vlm.plots.curves import (
    COLORS,
    MUTED,
    Band,
    Curve,
    combine,
    draw_band,
    new_figure,
    plain_legend,
    save_figure,
    style_panel,
)
from rl_vlm.types import UserInputError

Points = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Setting:
    """The runs of one setting: (iteration, metric) of each, and their last values."""

    name: str
    runs: tuple[Points, ...]
    last: tuple[float, ...]


def draw_settings(settings: Sequence[Setting], metric: str, path: Path) -> None:
    """Draw the settings, best first: the first few in colour with their names, the others grey.

    The band is a 95 % interval.
    """
    figure = new_figure()
    panel = figure.subplots()
    style_panel(panel)
    for number, setting in reversed(list(enumerate(settings))):
        band = _band([_curve(points, metric) for points in setting.runs])
        if number < len(COLORS):
            draw_band(panel, band, COLORS[number], f"{setting.name}: {statistics.fmean(setting.last):.3f}")
        else:
            draw_band(panel, band, MUTED, "")
    panel.set_xlabel("iterations")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    panel.set_ylabel(metric)
    handles, labels = panel.get_legend_handles_labels()
    plain_legend(panel.legend(handles[::-1], labels[::-1], frameon=False, fontsize=9, loc="best"))
    others = len(settings) - len(COLORS)
    if others > 0:
        figure.text(0.975, 0.945, f"grey: {others} other settings", fontsize=10, color=MUTED, va="center", ha="right")
    figure.subplots_adjust(left=0.1, right=0.975, top=0.92, bottom=0.125)
    save_figure(figure, [path])


def _band(curves: Sequence[Curve]) -> Band:
    """The runs of a setting together; of runs without a step in common (one ended at once) the longest alone."""
    try:
        return combine(curves)
    except UserInputError:
        return combine([max(curves, key=lambda curve: len(curve.steps))])


def _curve(points: Points, metric: str) -> Curve:
    """A run whose curve ends early (it was stopped) is drawn as far as it goes."""
    steps, values = zip(*points, strict=True)
    return Curve(np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64), metric)
