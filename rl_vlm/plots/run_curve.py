"""curve.png: sampled reward or training loss, held-out loss and greedy held-out accuracy of a run."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rl_vlm.config.yaml_text import load_yaml
from rl_vlm.files import whole_lines
from rl_vlm.plots.figures import COLORS, MARKERS, MUTED, add_legend, new_figure, save_figure


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
    return finite(table[name]) if name in table else pd.Series(dtype=float)


def finite(values: Any) -> Any:
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
