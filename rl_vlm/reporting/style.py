"""Colours, panels and files of all figures."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_pdf import FigureCanvasPdf
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from rl_vlm.files import write_atomic
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
