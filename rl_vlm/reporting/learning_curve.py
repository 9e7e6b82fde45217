"""Draws learning curves from eval.csv, ours, RL-VLM-F's and its fork's: mean and interval over the runs of a kind."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from rl_vlm.reporting.style import COLORS, INK, MARKERS, MUTED, check_outputs, new_figure, save_figure, style_panel
from rl_vlm.statistics import student_half_width
from rl_vlm.types import UserInputError

Unit = Literal["auto", "percent", "fraction"]
DEFAULT_FILE = "figure4_learning_curve.png"
DEFAULT_WINDOW = 5
SUCCESS = "success_rate"
_OURS = "success_rate_high"  # a column that only our files have: their rates are percent, even where all are below 1
_RETURNS = ("true_episode_reward", "episode_reward")  # drawn where a file has no success rate


@dataclass(frozen=True, slots=True)
class Curve:
    """Evaluations of one run: steps float64 [N], increasing, and values float64 [N]; success rates are in [0, 1]."""

    steps: np.ndarray
    values: np.ndarray
    column: str


@dataclass(frozen=True, slots=True)
class Band:
    """Runs of one kind on common steps: mean and 95 % interval of the mean, float64 [N]; no interval of one run."""

    steps: np.ndarray
    mean: np.ndarray
    low: np.ndarray | None
    high: np.ndarray | None
    runs: int


def read_curve(path: str | Path, column: str | None = None, unit: Unit = "auto") -> Curve:
    """Read eval.csv, or that of a run folder. Raises UserInputError.

    Lines without a number are left out, and of several lines of a step the last counts. A success rate is taken as
    percent unless the file is not ours and the whole column stays within [0, 1]; `unit` overrides that guess.
    """
    file = Path(path)
    file = file / "eval.csv" if file.is_dir() else file
    try:
        with file.open(newline="", encoding="utf-8", errors="replace") as stream:
            reader = csv.DictReader(stream)
            names = list(reader.fieldnames or ())
            chosen = column or next((name for name in (SUCCESS, *_RETURNS) if name in names), "")
            if "step" not in names or chosen not in names:
                wanted = column or f"{SUCCESS} or {_RETURNS[0]}"
                raise UserInputError(
                    f"{file} needs the columns step and {wanted}; it has {', '.join(names) or 'none'}."
                )
            points = [(_number(row["step"]), _number(row[chosen])) for row in reader]
    except (OSError, csv.Error) as error:
        raise UserInputError(f"Cannot read {file}: {getattr(error, 'strerror', None) or error}.") from error
    by_step = {step: value for step, value in points if math.isfinite(step) and math.isfinite(value)}
    if not by_step:
        raise UserInputError(f"{file} holds no line with a number in {chosen}.")
    steps, values = (np.array(part, dtype=np.float64) for part in zip(*sorted(by_step.items()), strict=True))
    if chosen == SUCCESS and (unit == "percent" or (unit == "auto" and (_OURS in names or values.max() > 1))):
        values = values / 100
    return Curve(steps, values, chosen)


def trailing_mean(values: np.ndarray, window: int) -> np.ndarray:
    """float64 [N]: the mean of each value and up to `window` - 1 before it."""
    sums = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - window, 0)
    return np.asarray((sums[ends] - sums[starts]) / (ends - starts))


def combine(curves: Sequence[Curve]) -> Band:
    """The runs on the union of their steps, as far as all of them reach; between its own steps a run is interpolated.

    The interval is Student's: mean ± t(0.975, n - 1) · s / √n.
    """
    start, stop = max(curve.steps[0] for curve in curves), min(curve.steps[-1] for curve in curves)
    steps = np.unique(np.concatenate([curve.steps for curve in curves]))
    steps = steps[(steps >= start) & (steps <= stop)]
    if not len(steps):
        raise UserInputError("The runs of one kind have no steps in common: draw them under different names.")
    table = np.stack([np.interp(steps, curve.steps, curve.values) for curve in curves])
    mean = table.mean(0)
    runs = len(curves)
    if runs == 1:
        return Band(steps, mean, None, None, 1)
    half = student_half_width(table)
    return Band(steps, mean, mean - half, mean + half, runs)


def draw_learning_curve(
    kinds: Mapping[str, Sequence[str | Path]],
    outputs: Sequence[Path],
    *,
    window: int = DEFAULT_WINDOW,
    title: str = "",
    column: str | None = None,
    unit: Unit = "auto",
) -> dict[str, Band]:
    """Draw one curve per kind (name to its runs), smoothed by a trailing mean, and return what was drawn."""
    if window < 1:
        raise UserInputError(f"The smoothing window ({window}) must be at least 1.")
    check_outputs(outputs)
    raw = {name: [read_curve(path, column, unit) for path in paths] for name, paths in kinds.items()}
    found = {curve.column for curves in raw.values() for curve in curves}
    if len(found) != 1:
        raise UserInputError(
            f"The files hold different measures ({', '.join(sorted(found))}): choose one with --column."
        )
    success = found == {SUCCESS}
    figure = new_figure()
    panel = figure.subplots()
    style_panel(panel)
    bands: dict[str, Band] = {}
    for place, (name, curves) in enumerate(raw.items()):
        smoothed = [Curve(curve.steps, trailing_mean(curve.values, window), curve.column) for curve in curves]
        bands[name] = combine(smoothed)
        _draw_band(panel, name, bands[name], curves if window > 1 else [], place % len(COLORS), success)
    panel.set_xlabel("environment steps")
    panel.set_ylabel("success rate" if success else found.pop().replace("_", " "))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}".replace(",", " ")))
    if success:
        panel.set_ylim(-0.03, 1.03)
    notes = ([f"mean of {window} evaluations"] if window > 1 else []) + (
        ["band: 95 % interval of the mean"] if any(band.low is not None for band in bands.values()) else []
    )
    if title:
        figure.text(0.1, 0.945, title, fontsize=15, fontweight="bold", color=INK, va="center", parse_math=False)
    figure.text(0.975, 0.945, ", ".join(notes), fontsize=10, color=MUTED, va="center", ha="right")
    legend = panel.legend(frameon=False, fontsize=10, labelcolor=INK, loc="best")
    for text in legend.get_texts():
        text.set_parse_math(False)
    figure.subplots_adjust(left=0.1, right=0.975, top=0.9, bottom=0.125)
    save_figure(figure, outputs)
    return bands


def _draw_band(panel: Axes, name: str, band: Band, raw: Sequence[Curve], place: int, success: bool) -> None:
    color = COLORS[place]
    for curve in raw:
        panel.plot(
            curve.steps, curve.values, linestyle="none", marker=MARKERS[place], markersize=3, color=color, alpha=0.35
        )
    if band.low is not None and band.high is not None:
        low, high = (np.clip(part, 0, 1) if success else part for part in (band.low, band.high))
        panel.fill_between(band.steps, low, high, color=color, alpha=0.18, linewidth=0)
    last = f"{band.mean[-1]:.2f}" if success else f"{band.mean[-1]:.4g}"
    label = f"{name}: {last}" + (f" ({band.runs} runs)" if band.runs > 1 else "")
    panel.plot(band.steps, band.mean, color=color, linewidth=2.2, label=label)


def _number(text: str | None) -> float:
    try:
        return float(text) if text else math.nan
    except ValueError:
        return math.nan
