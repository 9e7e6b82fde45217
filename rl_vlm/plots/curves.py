"""Draws curves: curve.png of any run, and learning curves from eval.csv, ours and those of RL-VLM-F and its fork."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

from rl_vlm.config.loading import load_yaml
from rl_vlm.files import whole_lines, write_atomic
from rl_vlm.numerics import student_half_width
from rl_vlm.types import UserInputError

INK, MUTED, GRID, GROUND = "#1f2933", "#6b7785", "#e4e7eb", "#ffffff"
# Distinct for colour-blind readers (Okabe and Ito).
COLORS = ("#2a78b8", "#d55e00", "#009e73", "#8a5fbf", "#a6761d", "#444444")
MARKERS = "os^Dvp"


def new_figure(width: float = 9.0, height: float = 5.0) -> Figure:
    """An empty figure of this size in inches.

    Matplotlib's own objects and not pyplot: no global state, so it works beside a user's notebook and in threads.
    """
    return Figure(figsize=(width, height), dpi=200, facecolor=GROUND)


def style_panel(panel: Axes) -> None:
    """Light horizontal grid, no frame."""
    panel.set_facecolor(GROUND)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.spines["bottom"].set_color(MUTED)
    panel.grid(axis="y", color=GRID, linewidth=0.9)
    panel.set_axisbelow(True)
    panel.tick_params(colors=MUTED, labelsize=10.5, length=0, pad=6)
    panel.tick_params(axis="x", length=4, color=MUTED)
    for axis in (panel.xaxis, panel.yaxis):
        axis.label.set(color=INK, fontsize=11)
        axis.labelpad = 8


def check_outputs(paths: Sequence[Path]) -> None:
    """Raise UserInputError unless every path can become a figure: before the work, not after it."""
    for path in paths:
        if path.suffix.lower() not in _WRITERS:
            raise UserInputError(f"A figure is written as .png, .svg or .pdf, not as {path.name}.")
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise UserInputError(f"The figure {path} cannot be written: name a file in a folder that exists.")


def save_figure(figure: Figure, paths: Sequence[Path]) -> None:
    """Write the figure to each path, whole or not at all, in the format of its suffix."""
    check_outputs(paths)
    for path in paths:
        write_atomic(path, _WRITERS[path.suffix.lower()](figure))


def _file(canvas: type[FigureCanvasBase], suffix: str, **options: Any) -> Callable[[Figure], bytes]:
    def write(figure: Figure) -> bytes:
        buffer = io.BytesIO()
        getattr(canvas(figure), f"print_{suffix}")(buffer, **options)
        return buffer.getvalue()

    return write


# Without dates, so that equal figures are equal files.
_WRITERS: dict[str, Callable[[Figure], bytes]] = {
    ".png": _file(FigureCanvasAgg, "png"),
    ".svg": _file(FigureCanvasSVG, "svg", metadata={"Date": None}),
    ".pdf": _file(FigureCanvasPdf, "pdf", metadata={"CreationDate": None}),
}


def plain_legend(legend: Legend) -> None:
    """Show the labels as they are: $ would begin a formula."""
    for text in legend.get_texts():
        text.set_parse_math(False)


# curve.png: sampled reward or training loss, held-out loss and greedy held-out accuracy of a run.

_SAMPLED, *_HELD_OUT = COLORS
_LEFT, _RIGHT = 0.105, 0.975  # of the panels, as shares of the figure

Series = list[tuple[int, float]]


@dataclass(slots=True)
class Curves:
    """The values to draw, by iteration."""

    name: str
    reward: Series = field(default_factory=list)
    accuracy: dict[str, Series] = field(default_factory=dict)  # by variant
    interval: dict[str, list[tuple[int, float, float]]] = field(default_factory=dict)
    chance: float | None = None
    of_steps: bool = False  # a preference run: environment steps, and success instead of accuracy
    loss: Series = field(default_factory=list)  # of supervised fine-tuning
    held_out_loss: Series = field(default_factory=list)


def draw_curve(run_folder: str | Path) -> Path:
    """Draw `curve.png` in a run folder from its progress.csv and eval.jsonl, either of which may be missing.

    Raises UserInputError if the folder does not exist or a file cannot be read.
    """
    folder = Path(run_folder)
    if not folder.is_dir():
        raise UserInputError(
            f"There is no run folder {folder}: give the folder that a run wrote, such as runs/quickstart."
        )
    curves = read_curves(folder)
    figure = new_figure()
    _draw(figure, curves)
    path = folder / "curve.png"
    save_figure(figure, [path])
    return path


def read_curves(folder: Path) -> Curves:
    """Read the values that `draw_curve` draws."""
    name, of_steps = _run_name(folder)
    curves = Curves(name, of_steps=of_steps)
    try:
        rows = list(csv.DictReader(line.decode() for line in whole_lines(folder / "progress.csv")))
        curves.reward, curves.loss = _column(rows, "reward/mean"), _column(rows, "sft/loss")
        evaluations: list[dict[str, Any]] = [json.loads(line) for line in whole_lines(folder / "eval.jsonl")]
        for entry in sorted(evaluations, key=lambda entry: int(entry["iteration"])):
            _add_evaluation(curves, entry)
    except (ValueError, KeyError, TypeError, OSError, csv.Error) as error:
        raise UserInputError(f"progress.csv or eval.jsonl in {folder} is damaged ({error}).") from error
    return curves


def _column(rows: Sequence[dict[str, str]], metric: str) -> Series:
    values = {int(row["iteration"]): float(row[metric]) for row in rows if row.get(metric)}
    return sorted((iteration, value) for iteration, value in values.items() if math.isfinite(value))


def smooth(values: np.ndarray) -> np.ndarray:
    """A centred Gaussian average of float64 [N] over about a twentieth of the values, normalised at the ends."""
    width = max(len(values) / 40, 1.0)
    reach = int(3 * width)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    # Not mode="same", which is as long as the kernel where that is longer than the values.
    weights = np.convolve(np.ones(len(values)), kernel)[reach : reach + len(values)]
    return np.convolve(values, kernel)[reach : reach + len(values)] / weights


def _run_name(folder: Path) -> tuple[str, bool]:
    """The run's name, and whether it is a preference run."""
    try:
        config = load_yaml((folder / "config.yaml").read_text())
        algorithm = config.get("algorithm") or {}
        return str(config["name"]), algorithm.get("name") == "preference_sac"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError):
        return folder.resolve().name, False


def _add_evaluation(curves: Curves, entry: dict[str, Any]) -> None:
    iteration = int(entry["iteration"])
    for key, value in entry.items():
        if not key.startswith("accuracy/") or value is None:
            continue
        variant = key.removeprefix("accuracy/")
        series = curves.accuracy.setdefault(variant, [])
        intervals = curves.interval.setdefault(variant, [])
        if series and series[-1][0] == iteration:  # measured twice: the later one counts
            series.pop()
            intervals[:] = [interval for interval in intervals if interval[0] != iteration]
        series.append((iteration, float(value)))
        low, high = entry.get(f"accuracy_low/{variant}"), entry.get(f"accuracy_high/{variant}")
        if low is not None and high is not None:
            intervals.append((iteration, float(low), float(high)))
    if entry.get("eval/loss") is not None:
        curves.held_out_loss.append((iteration, float(entry["eval/loss"])))
    if entry.get("chance") is not None:
        curves.chance = float(entry["chance"])


def _draw(figure: Figure, curves: Curves) -> None:
    rewards = np.array([value for _, value in curves.reward])
    losses = bool(curves.loss or curves.held_out_loss)
    # What is on another scale than accuracy gets its own panel: two scales on one axis mislead.
    other_scale = losses or (len(rewards) > 0 and (rewards.min() < -0.05 or rewards.max() > 1.05))
    separate = bool(curves.accuracy) and other_scale
    panels = list(figure.subplots(2 if separate else 1, 1, sharex=True, squeeze=False)[:, 0])
    upper, lower = panels[0], panels[-1]
    for panel in panels:
        style_panel(panel)
    _draw_sampled(upper, curves.reward, "sampled training reward")
    _draw_sampled(upper, curves.loss, "training loss")
    _draw_held_out(upper, curves.held_out_loss, [], "held-out loss", -1, ".3f")
    for number, (variant, series) in enumerate(curves.accuracy.items()):
        name = "accuracy" if variant == "default" else variant if len(variant) <= 40 else f"{variant[:38]}…"
        _draw_held_out(lower, series, curves.interval[variant], f"greedy held-out {name}", number, ".2f")
    if curves.chance is not None:
        lower.axhline(curves.chance, color=MUTED, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1.5)
        lower.annotate(
            f"chance {curves.chance:.2g}",
            (1, curves.chance),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 4),
            textcoords="offset points",
            ha="right",
            color=MUTED,
            fontsize=10,
        )
    accuracy = "success\n(share of episodes)" if curves.of_steps else "accuracy\n(share correct)"
    labels = ["reward (mean per episode)"] * bool(len(rewards)) + ["loss (nats per token)"] * losses
    if curves.accuracy:
        lower.set_ylim(-0.03, 1.03)
        lower.set_yticks(np.linspace(0, 1, 6))
        if separate:
            lower.set_ylabel(accuracy)
        else:
            labels.append(accuracy.replace("\n", " "))
    if (
        separate and len(rewards) and np.abs(rewards).max() >= 1000
    ):  # long numbers would push the label out of the picture
        upper.yaxis.set_major_formatter(EngFormatter(sep=""))
        labels = ["reward per episode"]
    upper.set_ylabel("\n".join(labels))
    lower.set_xlabel(
        "optimiser step" if losses else "environment steps" if curves.of_steps else "iteration (policy updates)"
    )
    lower.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 2.5, 5, 10]))
    everything = [curves.reward, curves.loss, curves.held_out_loss, *curves.accuracy.values()]
    last = max((series[-1][0] for series in everything if series), default=None)
    if last is None:
        upper.text(0.5, 0.5, "no iterations yet", transform=upper.transAxes, ha="center", color=MUTED, fontsize=13)
        upper.set_xlim(0, 10)
    else:
        lower.set_xlim(-0.02 * last, max(last, 1) * 1.02)
    top = _draw_title_and_legend(figure, panels, curves)
    figure.subplots_adjust(left=_LEFT, right=_RIGHT, top=top, bottom=0.125, hspace=0.12)


def _draw_sampled(panel: Axes, series: Series, label: str) -> None:
    if not series:
        return
    iterations, values = np.array(series).T
    raw = panel.plot(iterations, values, color=_SAMPLED, alpha=0.3, linewidth=1.0, zorder=2)
    if len(values) >= 5:
        panel.plot(iterations, smooth(values), color=_SAMPLED, linewidth=2.4, zorder=3, label=label)
    else:
        raw[0].set(alpha=1.0, marker=".", label=label)


def _draw_held_out(
    panel: Axes, series: Series, intervals: list[tuple[int, float, float]], label: str, number: int, form: str
) -> None:
    if not series:
        return
    color, marker = _HELD_OUT[number % len(_HELD_OUT)], MARKERS[number % len(MARKERS)]
    iterations, values = np.array(series).T
    for iteration, low, high in intervals:
        panel.plot([iteration, iteration], [low, high], color=color, linewidth=1.6, alpha=0.55, zorder=3.5)
    change = f"{values[0]:{form}} → {values[-1]:{form}}" if len(values) > 1 else f"{values[0]:{form}}"
    panel.plot(
        iterations, values, color=color, linewidth=1.2, linestyle=(0, (1, 1.5)), marker=marker,
        markersize=7.0 if len(series) <= 30 else 4.5,  # smaller where there are many points
        markeredgecolor=GROUND, markeredgewidth=1.0, zorder=4, label=f"{label}: {change}",
    )  # fmt: skip


def _draw_title_and_legend(figure: Figure, axes: Sequence[Axes], curves: Curves) -> float:
    """Title and legend above the panels; returns the top of the panels."""
    # parse_math: $ in the name of a run would begin a formula.
    figure.text(
        _LEFT, 0.945, curves.name, fontsize=15, fontweight="bold", color=INK, va="center", parse_math=False
    )  # fmt: skip
    if any(curves.interval.values()):
        figure.text(_RIGHT, 0.945, "bars: 95 % interval", fontsize=10, color=MUTED, va="center", ha="right")
    shown = [panel.get_legend_handles_labels() for panel in axes]
    handles, labels = (list(chain.from_iterable(parts)) for parts in zip(*shown, strict=True))
    if not handles:
        return 0.88
    columns = max(1, min(len(labels), 110 // (max(map(len, labels)) + 8)))
    legend = figure.legend(
        handles,
        labels,
        loc="upper left",
        bbox_to_anchor=(_LEFT - 0.012, 0.925),
        ncols=columns,
        frameon=False,
        fontsize=10,
        labelcolor=INK,
        handlelength=1.6,
        columnspacing=1.6,
    )
    plain_legend(legend)
    return 0.865 - 0.042 * math.ceil(len(labels) / columns)


# Learning curves from eval.csv: mean and interval over the runs of a kind.

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


def read_table(path: Path, default_name: str) -> tuple[list[str], list[dict[str, str]]]:
    """The columns and rows of a CSV file, or of `default_name` in a run folder. Raises UserInputError."""
    file = path / default_name if path.is_dir() else path
    try:
        with file.open(newline="", encoding="utf-8", errors="replace") as stream:
            reader = csv.DictReader(stream)
            return list(reader.fieldnames or ()), list(reader)
    except (OSError, csv.Error) as error:
        raise UserInputError(f"Cannot read {file}: {getattr(error, 'strerror', None) or error}.") from error


def read_curve(path: str | Path, column: str | None = None) -> Curve:
    """Read eval.csv, or that of a run folder. Raises UserInputError.

    Lines without a number are left out, and of several lines of a step the last counts. A success rate is taken as
    percent unless the file is not ours and the whole column stays within [0, 1].
    """
    names, rows = read_table(Path(path), "eval.csv")
    chosen = column or next((name for name in (SUCCESS, *_RETURNS) if name in names), "")
    if "step" not in names or chosen not in names:
        wanted = column or f"{SUCCESS} or {_RETURNS[0]}"
        raise UserInputError(f"{path} needs the columns step and {wanted}; it has {', '.join(names) or 'none'}.")
    points = [(_number(row["step"]), _number(row[chosen])) for row in rows]
    by_step = {step: value for step, value in points if math.isfinite(step) and math.isfinite(value)}
    if not by_step:
        raise UserInputError(f"{path} holds no line with a number in {chosen}.")
    steps, values = (np.array(part, dtype=np.float64) for part in zip(*sorted(by_step.items()), strict=True))
    if chosen == SUCCESS and (_OURS in names or values.max() > 1):
        values = values / 100
    return Curve(steps, values, chosen)


def trailing_mean(values: np.ndarray, window: int) -> np.ndarray:
    """float64 [N]: the mean of each value and up to `window` - 1 before it."""
    return np.array([values[max(k + 1 - window, 0) : k + 1].mean() for k in range(len(values))])


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
) -> dict[str, Band]:
    """Draw one curve per kind (name to its runs), smoothed by a trailing mean, and return what was drawn."""
    if window < 1:
        raise UserInputError(f"The smoothing window ({window}) must be at least 1.")
    check_outputs(outputs)
    raw = {name: [read_curve(path, column) for path in paths] for name, paths in kinds.items()}
    measures = {curve.column for curves in raw.values() for curve in curves}
    if len(measures) != 1:
        raise UserInputError(
            f"The files hold different measures ({', '.join(sorted(measures))}): choose one with --column."
        )
    success = measures == {SUCCESS}
    figure = new_figure()
    panel = figure.subplots()
    style_panel(panel)
    bands: dict[str, Band] = {}
    for number, (name, curves) in enumerate(raw.items()):
        color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
        smoothed = [Curve(curve.steps, trailing_mean(curve.values, window), curve.column) for curve in curves]
        band = bands[name] = combine(smoothed)
        for curve in curves if window > 1 else ():
            panel.plot(curve.steps, curve.values, marker, markersize=3, color=color, alpha=0.35)
        draw_band(panel, band, color, f"{name}: {band.mean[-1]:{'.2f' if success else '.4g'}}")
    panel.set_xlabel("environment steps")
    panel.set_ylabel("success rate" if success else measures.pop().replace("_", " "))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}".replace(",", " ")))
    if success:
        panel.set_ylim(-0.03, 1.03)
    notes = ([f"mean of {window} evaluations"] if window > 1 else []) + (
        ["band: 95 % interval of the mean"] if any(band.low is not None for band in bands.values()) else []
    )
    if title:
        figure.text(0.1, 0.945, title, fontsize=15, fontweight="bold", color=INK, va="center", parse_math=False)
    figure.text(0.975, 0.945, ", ".join(notes), fontsize=10, color=MUTED, va="center", ha="right")
    plain_legend(panel.legend(frameon=False, fontsize=10, labelcolor=INK, loc="best"))
    figure.subplots_adjust(left=0.1, right=0.975, top=0.9, bottom=0.125)
    save_figure(figure, outputs)
    return bands


def draw_band(panel: Axes, band: Band, color: str, label: str) -> None:
    """The mean, labelled with the number of runs, over its interval; without a label a thin line alone."""
    if label and band.low is not None and band.high is not None:
        panel.fill_between(band.steps, band.low, band.high, color=color, alpha=0.18, linewidth=0)
    runs = f" ({band.runs} runs)" if band.runs > 1 else ""
    marker = "o" if len(band.steps) == 1 else None  # a line of one point is not seen
    style: dict[str, Any] = {"linewidth": 2.2, "label": label + runs} if label else {"linewidth": 0.9, "alpha": 0.5}
    panel.plot(band.steps, band.mean, color=color, marker=marker, markersize=4, **style)


def _number(text: str | None) -> float:
    try:
        return float(text) if text else math.nan
    except ValueError:
        return math.nan
