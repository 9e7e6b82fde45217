"""Draws curve.png of supervised fine-tuning: training and held-out loss, and exact answers where they were written."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
from matplotlib.ticker import MaxNLocator

from rl_vlm.files import whole_lines
from rl_vlm.reporting.curve import smooth
from rl_vlm.reporting.style import COLORS, INK, new_figure, save_figure, style_panel
from rl_vlm.types import UserInputError

Series = list[tuple[int, float]]


def read_losses(folder: Path) -> dict[str, Series]:
    """By name (`sft/loss`, `eval/loss`, `accuracy/default`) the values of progress.csv and eval.jsonl, by step.

    Raises UserInputError for a damaged file.
    """
    found: dict[str, Series] = {"sft/loss": [], "eval/loss": [], "accuracy/default": []}
    try:
        for row in csv.DictReader(line.decode() for line in whole_lines(folder / "progress.csv")):
            if row.get("sft/loss"):
                found["sft/loss"].append((int(row["iteration"]), float(row["sft/loss"])))
        for line in whole_lines(folder / "eval.jsonl"):
            entry = json.loads(line)
            for name in ("eval/loss", "accuracy/default"):
                if entry.get(name) is not None:
                    found[name].append((int(entry["iteration"]), float(entry[name])))
    except (ValueError, KeyError, TypeError, OSError, csv.Error) as error:
        raise UserInputError(f"progress.csv or eval.jsonl in {folder} is damaged ({error}).") from error
    return found


def draw_sft_curve(folder: Path) -> Path:
    """Draw `curve.png` in a run folder."""
    series = read_losses(folder)
    figure = new_figure()
    panels = figure.subplots(2 if series["accuracy/default"] else 1, 1, sharex=True, squeeze=False)[:, 0]
    for panel in panels:
        style_panel(panel)
    if series["sft/loss"]:
        steps, values = np.array(series["sft/loss"]).T
        panels[0].plot(steps, values, color=COLORS[0], alpha=0.3, linewidth=1.0)
        panels[0].plot(steps, smooth(values), color=COLORS[0], linewidth=2.2, label="training loss")
    if series["eval/loss"]:
        steps, values = np.array(series["eval/loss"]).T
        label = f"held-out loss: {values[0]:.3f} → {values[-1]:.3f}"
        panels[0].plot(steps, values, color=COLORS[1], marker="o", linewidth=1.2, label=label)
    panels[0].set_ylabel("loss (nats per token)")  # in one line: ticks of three decimals leave no room for two
    if series["accuracy/default"]:
        steps, values = np.array(series["accuracy/default"]).T
        label = f"held-out exact answers: {values[0]:.2f} → {values[-1]:.2f}"
        panels[1].plot(steps, values, color=COLORS[2], marker="s", linewidth=1.2, label=label)
        panels[1].set_ylim(-0.03, 1.03)
        panels[1].set_ylabel("share right")
    panels[-1].set_xlabel("optimiser step")
    panels[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    for panel in panels:
        if panel.get_legend_handles_labels()[0]:
            panel.legend(loc="center right", frameon=False, fontsize=10, labelcolor=INK)
    figure.subplots_adjust(left=0.105, right=0.975, top=0.96, bottom=0.125, hspace=0.14)
    path = folder / "curve.png"
    save_figure(figure, [path])
    return path
