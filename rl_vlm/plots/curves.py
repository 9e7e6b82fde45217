"""Learning curves from eval.csv, ours and those of RL-VLM-F and its fork: mean and interval over the runs of a kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from rl_vlm.plots.figures import COLORS, MARKERS, add_legend, check_outputs, new_figure, save_figure
from rl_vlm.plots.run_curve import finite
from rl_vlm.statistics import student_half_width
from rl_vlm.types import UserInputError

Unit = Literal["percent", "fraction"]
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
    return finite(table[list(columns)].apply(pd.to_numeric, errors="coerce"))


def read_curve(path: str | Path, column: str | None = None, unit: Unit | None = None) -> pd.Series:
    """The evaluations of eval.csv by step, named by its column; of several lines of a step the last. Success rates are
    fractions, whatever their `unit` in the file is (None: as their size suggests). Raises UserInputError."""
    table = read_table(Path(path), "eval.csv")
    chosen = column or next((name for name in (SUCCESS, *_RETURNS) if name in table), "")
    if "step" not in table or chosen not in table:
        wanted = column or f"{SUCCESS} or {_RETURNS[0]}"
        raise UserInputError(f"{path} needs the columns step and {wanted}; it has {', '.join(table)}.")
    values = numbers_of(table, "step", chosen).groupby("step")[chosen].last()
    if values.empty:
        raise UserInputError(f"{path} holds no line with a number in {chosen}.")
    if chosen != SUCCESS or unit == "fraction":
        return values
    return values / 100 if unit == "percent" or _OURS in table or values.max() > 1 else values


def combine(curves: Sequence[pd.Series]) -> Band:
    """The runs on the steps that all of them reach, interpolated; with Student's interval ± t(0.975, n - 1) s / √n."""
    common = pd.concat(curves, axis=1).sort_index().interpolate("index", limit_area="inside").dropna()
    if common.empty:
        raise UserInputError("The runs of one kind have no steps in common: draw them under different names.")
    table = common.to_numpy().T
    half = student_half_width(table) if len(curves) > 1 else None
    return Band(common.index.to_numpy(), table.mean(0), half, len(curves))


def draw_learning_curve(
    kinds: Mapping[str, Sequence[str | Path]],
    outputs: Sequence[Path],
    *,
    window: int,
    title: str,
    column: str | None,
    unit: Unit | None = None,
) -> dict[str, Band]:
    """Draw one curve per kind (name to its runs), smoothed by a trailing mean, and return what was drawn."""
    check_outputs(outputs)
    raw = {name: [read_curve(path, column, unit) for path in paths] for name, paths in kinds.items()}
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
