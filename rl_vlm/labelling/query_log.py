"""The query log `vlm_query_log.csv`: one line per labelled pair, RL-VLM-F's columns first, ties and errors included."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_vlm.files import append_whole, csv_lines, cut_lines
from rl_vlm.labelling.labels import Label, SegmentPair, true_return
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
MAX_CELL = 50_000  # characters of an answer that are kept: Python's csv reads cells of up to 131,072


class StepCsv:
    """A CSV file that a resumed run continues; the column `step` and those before it hold numbers."""

    def __init__(self, path: Path, columns: Sequence[str], step: str = "step") -> None:
        self._path, self._columns, self._step = path, tuple(columns), columns.index(step)

    def rewind(self, step: int) -> None:
        """Remove the rows of later steps, which the run repeats; all of them at -1."""
        # Not with csv, which rejects long cells.
        cut_lines(self._path, lambda line: int(line.split(b",", self._step + 1)[self._step]), step, head=1)

    def add(self, *rows: Sequence[Any]) -> None:
        """Append rows, whole or not at all."""
        started = self._path.exists() and self._path.stat().st_size > 0
        append_whole(self._path, csv_lines(rows if started else [self._columns, *rows]))


def query_log(path: Path, more_columns: Sequence[str] = ()) -> StepCsv:
    return StepCsv(path, (*COLUMNS, *more_columns), "train_iter")


def log_row(pair: SegmentPair, label: Label, iteration: int, time: float, *more: str) -> tuple[Any, ...]:
    """The row of a pair; `time` in seconds since 1970, `more` are texts for further columns."""
    probabilities = ["", "", ""] if label.probabilities is None else [f"{p:.6g}" for p in label.probabilities]
    return (
        *(value if math.isfinite(value) else "" for value in map(true_return, (pair.first, pair.second))),
        "" if label.error else label.value,
        time,
        iteration,
        "both" if len(label.answers) == 2 else "given",
        " ".join(map(str, label.answers)),
        *probabilities,
        f"{label.seconds:.3f}",
        text_cell(label.error),
        text_cell(label.text),
        *map(csv_cell, more),
    )


def text_cell(text: str) -> str:
    """Foreign text as a cell: no secrets, nothing that a terminal or a spreadsheet would run, one short line."""
    if len(text) > MAX_CELL:
        text = f"{text[:MAX_CELL]}… ({len(text)} characters)"
    line = redact(text).replace("\\", "\\\\").replace("\r", "").replace("\n", "\\n").replace("\0", "")
    return csv_cell(line)
