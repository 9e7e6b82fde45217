"""Draws the accuracy of labels by the difference of the true returns, from vlm_query_log.csv, ours and the fork's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rl_vlm.numerics import wilson_interval
from rl_vlm.plots.curves import INK, MUTED, check_outputs, new_figure, read_table, save_figure, style_panel
from rl_vlm.types import UserInputError

DEFAULT_FILE = "figure6_query_accuracy.png"
DEFAULT_BINS = 10
CATEGORIES = ("correct", "incorrect", "no preference")
_COLORS = ("#3f9c5a", "#d1495b", "#9aa5b1")
_NEEDED = ("ground_truth_score_1", "ground_truth_score_2", "vlm_predicted_label")


@dataclass(frozen=True, slots=True)
class Labelled:
    """One label and the true returns of its pair."""

    first: float
    second: float
    label: int

    @property
    def category(self) -> str:
        """Of `CATEGORIES`.

        Where the returns are equal, no preference is the right answer, and any other a wrong one.
        """
        if self.first == self.second:
            return "correct" if self.label == -1 else "incorrect"
        if self.label == -1:
            return "no preference"
        return "correct" if self.label == int(self.first < self.second) else "incorrect"


@dataclass(frozen=True, slots=True)
class Histogram:
    """edges float64 [bins + 1] of |difference of returns|; counts int64 [bins, 3], in the order of `CATEGORIES`."""

    edges: np.ndarray
    counts: np.ndarray


def read_labels(path: str | Path) -> list[Labelled]:
    """Read a query log, or that of a run folder; lines without a label (errors) or returns are left out."""
    names, rows = read_table(Path(path), "vlm_query_log.csv")
    if missing := [name for name in _NEEDED if name not in names]:
        raise UserInputError(f"{path} lacks the columns {', '.join(missing)}.")
    found = []
    for row in rows:
        try:
            first, second, label = (float(row[name]) for name in _NEEDED)
        except (TypeError, ValueError):
            continue
        if math.isfinite(first) and math.isfinite(second) and label in (0, 1, -1):
            found.append(Labelled(first, second, int(label)))
    if not found:
        raise UserInputError(f"{path} holds no line with two returns and a label.")
    return found


def histogram(labels: Sequence[Labelled], bins: int = DEFAULT_BINS) -> Histogram:
    """Equal bins from 0 to the largest difference, which belongs to the last bin."""
    differences = np.array([abs(entry.first - entry.second) for entry in labels])
    edges = np.linspace(0.0, differences.max() or 1.0, bins + 1)
    categories = np.array([entry.category for entry in labels])
    counts = np.stack([np.histogram(differences[categories == name], edges)[0] for name in CATEGORIES], axis=1)
    return Histogram(edges, counts)


def summarise(labels: Sequence[Labelled]) -> dict[str, float | int]:
    """Counts, and the accuracy over pairs with different returns that got a preference, with its 95 % interval."""
    clear = [entry for entry in labels if entry.first != entry.second]
    decided = [entry for entry in clear if entry.label != -1]
    right = sum(entry.category == "correct" for entry in decided)
    low, high = wilson_interval(right, len(decided))
    return {
        "labels": len(labels),
        "true_ties": len(labels) - len(clear),
        "no_preference": sum(entry.label == -1 for entry in labels),
        "decided": len(decided),
        "accuracy": right / len(decided) if decided else math.nan,
        "accuracy_low": low,
        "accuracy_high": high,
    }


def draw_label_accuracy(
    logs: Sequence[str | Path], outputs: Sequence[Path], *, bins: int = DEFAULT_BINS, title: str = ""
) -> dict[str, float | int]:
    """Draw one stacked histogram of all logs, with 95 % intervals of the correct share; returns `summarise`."""
    if bins < 1:
        raise UserInputError(f"The number of bins ({bins}) must be at least 1.")
    check_outputs(outputs)
    labels = [entry for path in logs for entry in read_labels(path)]
    found = histogram(labels, bins)
    totals = found.counts.sum(1)
    filled = totals > 0
    shares = 100 * found.counts / np.maximum(totals, 1)[:, None]
    centres, width = (found.edges[:-1] + found.edges[1:]) / 2, found.edges[1] - found.edges[0]
    figure = new_figure()
    panel = figure.subplots()
    style_panel(panel)
    bottom = np.zeros(bins)
    for name, color, share in zip(CATEGORIES, _COLORS, shares.T, strict=True):
        panel.bar(centres, share, 0.9 * width, bottom, label=name, color=color)
        bottom += share
    for centre, right, total in zip(centres[filled], found.counts[filled, 0], totals[filled], strict=True):
        low, high = wilson_interval(int(right), int(total))
        panel.plot([centre, centre], [100 * low, 100 * high], color=INK, linewidth=1.2, alpha=0.7)
        panel.annotate(str(total), (centre, 101), ha="center", va="bottom", fontsize=9, color=MUTED)
    panel.set_ylim(0, 107)
    panel.set_yticks(range(0, 101, 20))
    panel.set_xlabel("|difference of true returns| (left: hard, right: easy)")
    panel.set_ylabel("share of labels (%)")
    summary = summarise(labels)
    heading = title or "Labels against the true returns"
    figure.text(0.1, 0.955, heading, fontsize=15, fontweight="bold", color=INK, va="center", parse_math=False)
    accuracy = f"accuracy where decided {summary['accuracy']:.2f} ({summary['decided']} of {summary['labels']} pairs)"
    figure.text(0.975, 0.955, accuracy, fontsize=10, color=MUTED, va="center", ha="right")
    panel.legend(frameon=False, fontsize=10, labelcolor=INK, ncols=3, loc="upper left", bbox_to_anchor=(-0.01, 1.09))
    figure.subplots_adjust(left=0.1, right=0.975, top=0.86, bottom=0.125)
    save_figure(figure, outputs)
    return summary
