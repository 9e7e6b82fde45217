"""Draws the accuracy of labels by the difference of the true returns, from vlm_query_log.csv, ours and the fork's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from rl_vlm.plots.curves import numbers_of, read_table
from rl_vlm.plots.figures import INK, MUTED, add_legend, check_outputs, new_figure, save_figure
from rl_vlm.statistics import wilson_interval
from rl_vlm.types import UserInputError

DEFAULT_FILE = "figure6_query_accuracy.png"
CATEGORIES = ("correct", "incorrect", "no preference")
_COLORS = ("#3f9c5a", "#d1495b", "#9aa5b1")
_NEEDED = ("ground_truth_score_1", "ground_truth_score_2", "vlm_predicted_label")


def read_labels(path: str | Path) -> pd.DataFrame:
    """The lines of a query log with returns and a label. Of equal returns, no preference is the right answer."""
    table = read_table(Path(path), "vlm_query_log.csv")
    if missing := [name for name in _NEEDED if name not in table]:
        raise UserInputError(f"{path} lacks the columns {', '.join(missing)}.")
    found = numbers_of(table, *_NEEDED)
    found = found[found[_NEEDED[2]].isin((0, 1, -1))]
    if found.empty:
        raise UserInputError(f"{path} holds no line with two returns and a label.")
    first, second, label = (found[name].to_numpy() for name in _NEEDED)
    right = np.where(first == second, -1, first < second)
    category = np.select([label == right, label != -1], CATEGORIES[:2], CATEGORIES[2])
    return pd.DataFrame({"difference": np.abs(first - second), "label": label, "category": category})


def histogram(labels: pd.DataFrame, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Equal bins: edges float64 [bins + 1], and counts int64 [bins, 3] in the order of `CATEGORIES`."""
    edges = np.linspace(0.0, labels.difference.max() or 1.0, bins + 1)
    counts = [np.histogram(labels.difference[labels.category == name], edges)[0] for name in CATEGORIES]
    return edges, np.stack(counts, axis=1)


def summarise(labels: pd.DataFrame) -> dict[str, float | int]:
    """Counts, and the accuracy over pairs with different returns that got a preference, with its 95 % interval."""
    clear = labels[labels.difference > 0]
    decided = clear[clear.label != -1]
    right = int((decided.category == "correct").sum())
    low, high = wilson_interval(right, len(decided))
    return {
        "labels": len(labels),
        "true_ties": len(labels) - len(clear),
        "no_preference": int((labels.label == -1).sum()),
        "decided": len(decided),
        "accuracy": right / len(decided) if len(decided) else math.nan,
        "accuracy_low": low,
        "accuracy_high": high,
    }


def draw_label_accuracy(
    logs: Sequence[str | Path], outputs: Sequence[Path], *, bins: int, title: str = ""
) -> dict[str, float | int]:
    """Draw one stacked histogram of all logs, with 95 % intervals of the correct share; returns `summarise`."""
    check_outputs(outputs)
    labels = pd.concat([read_labels(path) for path in logs])
    summary = summarise(labels)
    edges, counts = histogram(labels, bins)
    totals = counts.sum(1)
    shares = 100 * counts / np.maximum(totals, 1)[:, None]
    centres, width = (edges[:-1] + edges[1:]) / 2, edges[1] - edges[0]
    note = f"accuracy where decided {summary['accuracy']:.2f} ({summary['decided']} of {summary['labels']} pairs)"
    figure, (panel,) = new_figure(title=title or "Labels against the true returns", note=note)
    for name, color, share, below in zip(CATEGORIES, _COLORS, shares.T, shares.cumsum(1).T - shares.T, strict=True):
        panel.bar(centres, share, 0.9 * width, below, label=name, color=color)
    for centre, right, total in zip(centres, counts[:, 0], totals, strict=True):
        if total:
            panel.vlines(centre, *(100 * np.array(wilson_interval(right, total))), color=INK, linewidth=1.2, alpha=0.7)
            panel.annotate(str(total), (centre, 101), ha="center", va="bottom", fontsize=9, color=MUTED)
    panel.set_ylim(0, 107)
    panel.set_yticks(range(0, 101, 20))
    panel.set_xlabel("|difference of true returns| (left: hard, right: easy)")
    panel.set_ylabel("share of labels (%)")
    add_legend(figure, ncols=3, loc="outside lower left")
    save_figure(figure, outputs)
    return summary
