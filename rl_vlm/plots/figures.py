"""The look of all figures, and their files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rl_vlm.files import write_atomic
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
