"""Draws curve.png: sampled reward and greedy held-out accuracy of a run."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from rl_vlm.config.yaml_text import load_yaml
from rl_vlm.files import whole_lines
from rl_vlm.reporting.style import COLORS, GROUND, INK, MUTED, new_figure, save_figure, style_panel
from rl_vlm.types import UserInputError

_REWARD, *_VARIANTS = COLORS
_MARKERS = "osD^v"
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
        rows = csv.DictReader(line.decode() for line in whole_lines(folder / "progress.csv"))
        reward = {int(row["iteration"]): float(row["reward/mean"]) for row in rows if row.get("reward/mean")}
        evaluations: list[dict[str, Any]] = [json.loads(line) for line in whole_lines(folder / "eval.jsonl")]
        for entry in sorted(evaluations, key=lambda entry: int(entry["iteration"])):
            _add_evaluation(curves, entry)
    except (ValueError, KeyError, TypeError, OSError, csv.Error) as error:
        raise UserInputError(f"progress.csv or eval.jsonl in {folder} is damaged ({error}).") from error
    curves.reward = sorted((iteration, value) for iteration, value in reward.items() if np.isfinite(value))
    return curves


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
    if entry.get("chance") is not None:
        curves.chance = float(entry["chance"])


def _draw(figure: Figure, curves: Curves) -> None:
    rewards = np.array([value for _, value in curves.reward])
    # Rewards on another scale than accuracy get their own panel: two scales on one axis mislead.
    separate = bool(curves.accuracy) and len(rewards) > 0 and (rewards.min() < -0.05 or rewards.max() > 1.05)
    axes = list(figure.subplots(2 if separate else 1, 1, sharex=True, squeeze=False)[:, 0])
    upper, lower = axes[0], axes[-1]
    for panel in axes:
        style_panel(panel)
    if len(rewards):
        _draw_reward(upper, curves.reward)
    for number, (variant, series) in enumerate(curves.accuracy.items()):
        name = "accuracy" if variant == "default" else variant if len(variant) <= 40 else f"{variant[:38]}…"
        change = f"{series[0][1]:.2f} → {series[-1][1]:.2f}" if len(series) > 1 else f"{series[0][1]:.2f}"
        label = f"greedy held-out {name}: {change}"
        _draw_accuracy(lower, series, curves.interval[variant], label, number % len(_VARIANTS))
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
    if curves.accuracy:
        lower.set_ylim(-0.03, 1.03)
        lower.set_yticks(np.linspace(0, 1, 6))
    if not len(rewards) and not curves.accuracy:
        upper.text(0.5, 0.5, "no iterations yet", transform=upper.transAxes, ha="center", color=MUTED, fontsize=13)
        upper.set_xlim(0, 10)
    if separate:
        upper.set_ylabel("reward\n(mean per episode)")
        lower.set_ylabel("success\n(share of episodes)" if curves.of_steps else "accuracy\n(share correct)")
        if np.abs(rewards).max() >= 1000:  # long numbers would push the label out of the picture
            upper.yaxis.set_major_formatter(EngFormatter(sep=""))
            upper.set_ylabel("reward per episode")
    else:
        labels = ["reward (mean per episode)"] * bool(len(rewards))
        labels += ["accuracy (share correct)"] * bool(curves.accuracy)
        upper.set_ylabel("\n".join(labels))
    lower.set_xlabel("environment steps" if curves.of_steps else "iteration (policy updates)")
    lower.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 2.5, 5, 10]))
    last = [series[-1][0] for series in [curves.reward, *curves.accuracy.values()] if series]
    if last:
        lower.set_xlim(-0.02 * max(last), max(*last, 1) * 1.02)
    top = _draw_title_and_legend(figure, axes, curves)
    figure.subplots_adjust(left=_LEFT, right=_RIGHT, top=top, bottom=0.125, hspace=0.12)


def _draw_reward(panel: Axes, reward: Series) -> None:
    iterations, values = np.array(reward).T
    raw = panel.plot(iterations, values, color=_REWARD, alpha=0.3, linewidth=1.0, zorder=2)
    if len(values) >= 5:
        panel.plot(iterations, smooth(values), color=_REWARD, linewidth=2.4, zorder=3, label="sampled training reward")
    else:
        raw[0].set(alpha=1.0, marker=".", label="sampled training reward")


def _draw_accuracy(
    panel: Axes, series: Series, intervals: list[tuple[int, float, float]], label: str, place: int
) -> None:
    color = _VARIANTS[place]
    iterations, values = np.array(series).T
    for iteration, low, high in intervals:
        panel.plot([iteration, iteration], [low, high], color=color, linewidth=1.6, alpha=0.55, zorder=3.5)
    # Smaller markers where there are many points.
    size = 7.0 if len(series) <= 30 else 4.5
    panel.plot(
        iterations, values, color=color, linewidth=1.2, linestyle=(0, (1, 1.5)), marker=_MARKERS[place],
        markersize=size, markeredgecolor=GROUND, markeredgewidth=1.0, zorder=4, label=label,
    )  # fmt: skip


def _draw_title_and_legend(figure: Figure, axes: Sequence[Axes], curves: Curves) -> float:
    """Title and legend above the panels; returns the top of the panels."""
    # parse_math: $ in the name of a run would begin a formula.
    figure.text(
        _LEFT, 0.945, curves.name, fontsize=15, fontweight="bold", color=INK, va="center", parse_math=False
    )  # fmt: skip
    if any(curves.interval.values()):
        figure.text(_RIGHT, 0.945, "bars: 95 % interval", fontsize=10, color=MUTED, va="center", ha="right")
    found = [panel.get_legend_handles_labels() for panel in axes]
    handles = [handle for some, _ in found for handle in some]
    labels = [label for _, some in found for label in some]
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
    for text in legend.get_texts():
        text.set_parse_math(False)
    return 0.865 - 0.042 * math.ceil(len(labels) / columns)
