"""Draws curves: curve.png of any run, and learning curves from eval.csv, ours and those of RL-VLM-F and its fork."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from rl_vlm.config.loading import load_yaml
from rl_vlm.files import whole_lines, write_atomic
from rl_vlm.statistics import student_half_width
from rl_vlm.types import UserInputError

INK, MUTED, GRID = "#1f2933", "#6b7785", "#e4e7eb"
# Distinct for colour-blind readers (Okabe and Ito).
COLORS = ("#2a78b8", "#d55e00", "#009e73", "#8a5fbf", "#a6761d", "#444444")
MARKERS = "os^Dvp"
# Metadata without dates, so that equal figures are equal files.
_FORMATS: dict[str, dict[str, Any]] = {".png": {}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def new_figure(
    width: float = 9.0, height: float = 5.0, *, title: str = "", note: str = "", panels: int = 1
) -> tuple[Figure, list[Axes]]:
    """A figure of this size in inches and its panels, one below the other. No global state, unlike pyplot."""
    figure = Figure(figsize=(width, height), dpi=200)
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.08)
    axes = list(figure.subplots(panels, 1, sharex=True, squeeze=False)[:, 0])
    for panel in axes:
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.spines["bottom"].set_color(MUTED)
        panel.grid(axis="y", color=GRID, linewidth=0.9)
        panel.set_axisbelow(True)
        panel.tick_params(colors=MUTED, labelsize=10.5, length=0, pad=6)
        panel.tick_params(axis="x", length=4, color=MUTED)
        for axis in (panel.xaxis, panel.yaxis):
            axis.label.set(color=INK, fontsize=11)
    # parse_math: $ in the name of a run would begin a formula.
    axes[0].set_title(title, loc="left", fontsize=15, fontweight="bold", color=INK, parse_math=False)
    axes[0].set_title(note, loc="right", fontsize=10, color=MUTED)
    return figure, axes


def add_legend(place: Figure | Axes, **options: Any) -> None:
    for text in place.legend(frameon=False, labelcolor=INK, **{"fontsize": 10, **options}).get_texts():
        text.set_parse_math(False)


def check_outputs(paths: Sequence[Path]) -> None:
    """Raise UserInputError unless every path can become a figure: before the work, not after it."""
    for path in paths:
        if path.suffix.lower() not in _FORMATS:
            raise UserInputError(f"A figure is written as .png, .svg or .pdf, not as {path.name}.")
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise UserInputError(f"The figure {path} cannot be written: name a file in a folder that exists.")


def save_figure(figure: Figure, paths: Sequence[Path]) -> None:
    for path in paths:
        buffer, suffix = io.BytesIO(), path.suffix.lower()
        figure.savefig(buffer, format=suffix[1:], metadata=_FORMATS[suffix])
        write_atomic(path, buffer.getvalue())


# curve.png: sampled reward or training loss, held-out loss and greedy held-out accuracy of a run.


def draw_curve(folder: Path) -> Path:
    """Draw `curve.png` in a run folder from its config.yaml, progress.csv and eval.jsonl."""
    config = load_yaml((folder / "config.yaml").read_text())
    rows = io.BytesIO(b"\n".join(whole_lines(folder / "progress.csv")) or b"iteration")
    evaluations = pd.DataFrame([json.loads(line) for line in whole_lines(folder / "eval.jsonl")])
    of_steps = (config.get("algorithm") or {}).get("name") == "preference_sac"
    figure = curve_figure(pd.read_csv(rows, index_col="iteration"), evaluations, config["name"], of_steps=of_steps)
    save_figure(figure, [path := folder / "curve.png"])
    return path


def curve_figure(progress: pd.DataFrame, evaluations: pd.DataFrame, name: str, *, of_steps: bool = False) -> Figure:
    """The rows of progress.csv and eval.jsonl. What is on another scale than accuracy gets a panel of its own."""
    measured = evaluations.groupby("iteration").last() if len(evaluations) else evaluations  # the later one counts
    reward, loss = _column(progress, "reward/mean"), _column(progress, "sft/loss")
    held_out_loss, chance = _column(measured, "eval/loss"), _column(measured, "chance")
    accuracy = {key[9:]: _column(measured, key) for key in measured if key.startswith("accuracy/")}
    intervals = {
        variant: [_column(measured, f"accuracy_{end}/{variant}") for end in ("low", "high")] for variant in accuracy
    }
    losses = len(loss) + len(held_out_loss) > 0
    separate = bool(accuracy) and (losses or reward.min() < -0.05 or reward.max() > 1.05)
    note = "bars: 95 % interval" if any(len(low) for low, _ in intervals.values()) else ""
    figure, panels = new_figure(title=name, note=note, panels=1 + separate)
    upper, lower = panels[0], panels[-1]
    for values, label in ((reward, "sampled training reward"), (loss, "training loss")):
        if len(values):
            upper.plot(values, color=COLORS[0], alpha=0.3, linewidth=1.0, marker="." if len(values) < 5 else "")
            upper.plot(smooth(values), color=COLORS[0], linewidth=2.4, label=label)
    _draw_held_out(upper, held_out_loss, [], "held-out loss", 4, ".3f")
    for number, (variant, values) in enumerate(accuracy.items()):
        shown = "accuracy" if variant == "default" else variant if len(variant) <= 40 else f"{variant[:38]}…"
        _draw_held_out(lower, values, intervals[variant], f"greedy held-out {shown}", number, ".2f")
    if len(chance):
        label = f"chance {chance.iloc[-1]:.2g}"
        lower.axhline(chance.iloc[-1], color=MUTED, linewidth=1.2, linestyle="--", zorder=1.5, label=label)
    labels = ["reward (mean per episode)"] * (len(reward) > 0) + ["loss (nats per token)"] * losses
    upper.set_ylabel("\n".join(labels).replace(" (", "\n(" if separate else " ("))
    if accuracy:
        lower.set_ylim(-0.03, 1.03)
        share = "success (share of episodes)" if of_steps else "accuracy (share correct)"
        lower.set_ylabel(share.replace(" (", "\n(") if separate else "\n".join([*labels, share]))
    unit = "optimiser step" if losses else "environment steps" if of_steps else "iteration (policy updates)"
    lower.set_xlabel(unit)
    lower.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 2.5, 5, 10]))
    names = [label for panel in panels for label in panel.get_legend_handles_labels()[1]]
    if names:
        add_legend(figure, loc="outside lower left", ncols=max(1, min(len(names), 110 // (max(map(len, names)) + 8))))
    return figure


def smooth(values: pd.Series) -> pd.Series:
    """A centred Gaussian average over about a twentieth of the values."""
    width = max(len(values) / 40, 1.0)
    window = values.rolling(2 * int(3 * width) + 1, center=True, min_periods=1, win_type="gaussian")
    return window.mean(std=width)


def _column(table: pd.DataFrame, name: str) -> pd.Series:
    return _finite(table[name]) if name in table else pd.Series(dtype=float)


def _finite(values: Any) -> Any:
    return values.astype(float).replace([np.inf, -np.inf], np.nan).dropna()


def _draw_held_out(
    panel: Axes, values: pd.Series, interval: Sequence[pd.Series], label: str, number: int, form: str
) -> None:
    if not len(values):
        return
    color = COLORS[1:][number % len(COLORS[1:])]
    if interval:
        panel.vlines(interval[0].index, *interval, color=color, linewidth=1.6, alpha=0.55)
    change = " → ".join(f"{value:{form}}" for value in values.iloc[[0, -1] if len(values) > 1 else [0]])
    panel.plot(
        values, color=color, linewidth=1.2, linestyle=(0, (1, 1.5)), marker=MARKERS[number % len(MARKERS)],
        markersize=7.0 if len(values) <= 30 else 4.5,  # smaller where there are many points
        markeredgecolor="white", markeredgewidth=1.0, zorder=4, label=f"{label}: {change}",
    )  # fmt: skip


# Learning curves from eval.csv: mean and interval over the runs of a kind.

DEFAULT_FILE = "figure4_learning_curve.png"
SUCCESS = "success_rate"
_OURS = "success_rate_high"  # a column that only our files have: their rates are percent, even where all are below 1
_RETURNS = ("true_episode_reward", "episode_reward")  # drawn where a file has no success rate


@dataclass(frozen=True, slots=True)
class Band:
    """Runs of one kind on common steps: mean and half the 95 % interval of the mean, float64 [N]; None of one run."""

    steps: np.ndarray
    mean: np.ndarray
    half: np.ndarray | None
    runs: int


def read_table(path: Path, default_name: str) -> pd.DataFrame:
    """A CSV file, or `default_name` in a run folder, as texts. Raises UserInputError."""
    file = path / default_name if path.is_dir() else path
    try:
        return pd.read_csv(file, dtype=str, index_col=False, encoding_errors="replace")
    except (OSError, ValueError) as error:
        raise UserInputError(f"Cannot read {file}: {getattr(error, 'strerror', None) or error}.") from error


def numbers_of(table: pd.DataFrame, *columns: str) -> pd.DataFrame:
    return _finite(table[list(columns)].apply(pd.to_numeric, errors="coerce"))


def read_curve(path: str | Path, column: str | None = None) -> pd.Series:
    """The evaluations of eval.csv by step, named by its column; of several lines of a step the last. Raises
    UserInputError."""
    table = read_table(Path(path), "eval.csv")
    chosen = column or next((name for name in (SUCCESS, *_RETURNS) if name in table), "")
    if "step" not in table or chosen not in table:
        wanted = column or f"{SUCCESS} or {_RETURNS[0]}"
        raise UserInputError(f"{path} needs the columns step and {wanted}; it has {', '.join(table)}.")
    values = numbers_of(table, "step", chosen).groupby("step")[chosen].last()
    if values.empty:
        raise UserInputError(f"{path} holds no line with a number in {chosen}.")
    return values / 100 if chosen == SUCCESS and (_OURS in table or values.max() > 1) else values


def combine(curves: Sequence[pd.Series]) -> Band:
    """The runs on the steps that all of them reach, interpolated; with Student's interval ± t(0.975, n - 1) s / √n."""
    common = pd.concat(curves, axis=1).sort_index().interpolate("index", limit_area="inside").dropna()
    if common.empty:
        raise UserInputError("The runs of one kind have no steps in common: draw them under different names.")
    table = common.to_numpy().T
    half = student_half_width(table) if len(curves) > 1 else None
    return Band(common.index.to_numpy(), table.mean(0), half, len(curves))


def draw_learning_curve(
    kinds: Mapping[str, Sequence[str | Path]], outputs: Sequence[Path], *, window: int, title: str, column: str | None
) -> dict[str, Band]:
    """Draw one curve per kind (name to its runs), smoothed by a trailing mean, and return what was drawn."""
    check_outputs(outputs)
    raw = {name: [read_curve(path, column) for path in paths] for name, paths in kinds.items()}
    measures = {str(curve.name) for curves in raw.values() for curve in curves}
    if len(measures) != 1:
        raise UserInputError(
            f"The files hold different measures ({', '.join(sorted(measures))}): choose one with --column."
        )
    success = measures == {SUCCESS}
    bands = {
        name: combine([curve.rolling(window, min_periods=1).mean() for curve in curves]) for name, curves in raw.items()
    }
    notes = [f"mean of {window} evaluations"] * (window > 1)
    notes += ["band: 95 % interval of the mean"] * any(band.half is not None for band in bands.values())
    figure, (panel,) = new_figure(title=title, note=", ".join(notes))
    for number, (name, band) in enumerate(bands.items()):
        color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
        for curve in raw[name] if window > 1 else ():
            panel.plot(curve, marker, markersize=3, color=color, alpha=0.35)
        draw_band(panel, band, color, f"{name}: {band.mean[-1]:{'.2f' if success else '.4g'}}")
    panel.set_xlabel("environment steps")
    panel.set_ylabel("success rate" if success else measures.pop().replace("_", " "))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}".replace(",", " ")))
    if success:
        panel.set_ylim(-0.03, 1.03)
    add_legend(panel)
    save_figure(figure, outputs)
    return bands


def draw_band(panel: Axes, band: Band, color: str, label: str) -> None:
    """The mean, labelled with the number of runs, over its interval; without a label a thin line alone."""
    if label and band.half is not None:
        low, high = band.mean - band.half, band.mean + band.half
        panel.fill_between(band.steps, low, high, color=color, alpha=0.18, linewidth=0)
    runs = f" ({band.runs} runs)" if band.runs > 1 else ""
    marker = "o" if len(band.steps) == 1 else None  # a line of one point is not seen
    style: dict[str, Any] = {"linewidth": 2.2, "label": label + runs} if label else {"linewidth": 0.9, "alpha": 0.5}
    panel.plot(band.steps, band.mean, color=color, marker=marker, markersize=4, **style)
