"""`vlm_query_log.csv`: one line per labelled pair, RL-VLM-F's columns first, ties and errors included."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rl_vlm.files import append_whole, whole_lines, write_atomic
from rl_vlm.labelling.types import Label, Segment, SegmentPair
from rl_vlm.safe_text import csv_cell, redact

FILE_NAME = "vlm_query_log.csv"
COLUMNS = (
    "ground_truth_score_1",
    "ground_truth_score_2",
    "vlm_predicted_label",  # empty where there was no answer
    "timestamp",  # seconds since 1970
    "train_iter",
    # Ours.
    "order",  # "given", or "both" where the pair was shown in both orders
    "answers",  # per order, in terms of the pair
    "probability_first",
    "probability_second",
    "probability_neither",
    "latency_s",
    "error",
    "raw_text",
)
_ITERATION = COLUMNS.index("train_iter")
MAX_CELL = 50_000  # characters of an answer that are kept: Python's csv reads cells of up to 131,072


class QueryLog:
    """Appends to the log; each line is written whole or not at all."""

    def __init__(self, path: str | Path, keep_until: int | None = None) -> None:
        """Continue the file. With `keep_until`, lines of later iterations are removed first: a resumed run repeats them."""
        self._path = Path(path)
        if keep_until is None:
            return
        lines = whole_lines(self._path)
        kept = [line for line in lines[1:] if _iteration(line) <= keep_until]
        if lines:
            write_atomic(self._path, b"".join(line + b"\n" for line in [lines[0], *kept]))

    def append(self, pairs: Sequence[SegmentPair], labels: Sequence[Label], *, iteration: int, time: float) -> None:
        """One line per pair; `time` in seconds since 1970."""
        started = self._path.exists() and self._path.stat().st_size > 0
        self._path.parent.mkdir(parents=True, exist_ok=True)
        append_whole(self._path, log_csv(pairs, labels, iteration, time, header=not started))


def log_csv(
    pairs: Sequence[SegmentPair],
    labels: Sequence[Label],
    iteration: int,
    time: float,
    more_columns: Sequence[str] = (),
    more: Sequence[Sequence[str]] | None = None,
    header: bool = True,
) -> bytes:
    """The lines of the log, with more columns at the end if they are given (one sequence per pair)."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    if header:
        writer.writerow([*COLUMNS, *more_columns])
    for pair, label, extra in zip(pairs, labels, more or [()] * len(pairs), strict=True):
        writer.writerow([*_row(pair, label, time, iteration), *map(csv_cell, extra)])
    return buffer.getvalue().encode("utf-8", "replace")


def true_return(segment: Segment) -> float:
    """The undiscounted sum of the true rewards."""
    return float(np.sum(segment.true_rewards, dtype=np.float64))


def _row(pair: SegmentPair, label: Label, time: float, iteration: int) -> Sequence[object]:
    probabilities = ["", "", ""] if label.probabilities is None else [f"{p:.6g}" for p in label.probabilities]
    return (
        _known(true_return(pair.first)),
        _known(true_return(pair.second)),
        "" if label.error else label.value,
        time,
        iteration,
        "both" if len(label.answers) == 2 else "given",
        " ".join(map(str, label.answers)),
        *probabilities,
        f"{label.seconds:.3f}",
        text_cell(label.error),
        text_cell(label.text),
    )


def _known(value: float) -> float | str:
    """Empty if the true return is not known."""
    return value if math.isfinite(value) else ""


def text_cell(text: str) -> str:
    """Foreign text as a cell: no secrets, nothing that a terminal or a spreadsheet would run, and of bounded length.

    Line breaks are the two characters \\n, so that every line of the file is one row.
    """
    if len(text) > MAX_CELL:
        text = f"{text[:MAX_CELL]}… ({len(text)} characters)"
    line = redact(text).replace("\\", "\\\\").replace("\r", "").replace("\n", "\\n").replace("\0", "")
    return csv_cell(line)


def _iteration(line: bytes) -> float:
    try:
        return int(
            line.split(b",", _ITERATION + 1)[_ITERATION]
        )  # not csv, which refuses long cells; numbers come first
    except (IndexError, ValueError):
        return math.inf
