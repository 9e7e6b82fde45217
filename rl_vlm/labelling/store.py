"""The label store of a run: labelled pairs, or scored segments. Labels can be replayed without a VLM."""

from __future__ import annotations

import csv
import filecmp
import io
import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rl_vlm.config.labels import names_no_cache
from rl_vlm.envs.data import TooLargeError, read_parquet
from rl_vlm.envs.images import ImageError, check_header, image_bytes, pixels
from rl_vlm.files import append_whole, link_tree, whole_lines, write_atomic
from rl_vlm.labelling.types import IDENTICAL, SKIPPED, Label, Labeller, LabelValue, Score, Segment, SegmentPair, encode
from rl_vlm.safe_text import csv_cell, redact
from rl_vlm.types import RLVLMError, UserInputError

# One labelling session: draw pairs, have them labelled, draw more where too few were decided.

Draw = Callable[[int], Sequence[SegmentPair]]


class LabellerDownError(RLVLMError):
    """Not one pair of a session could be labelled: the labeller is down or refuses every question."""


@dataclass(slots=True)
class LabelledSession:
    """The pairs of a session and their labels, in the order in which they were asked."""

    pairs: list[SegmentPair] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def num_decided(self) -> int:
        """Labels 0 and 1."""
        return sum(is_decided(label) for label in self.labels)


def is_answer(label: Label) -> bool:
    """Whether the label may be trained on: not an error, not skipped."""
    return not label.error


def is_decided(label: Label) -> bool:
    """Whether one of the two was preferred."""
    return is_answer(label) and label.value != -1


async def label_session(
    labeller: Labeller, draw: Draw, wanted: int, max_rounds: int = 4, max_pairs: int | None = None
) -> LabelledSession:
    """Label `wanted` pairs; while fewer than that are decided, draw and label as many again as are missing.

    With the original's single round, a policy that hardly moves (pairs look alike) leaves few usable pairs in a
    session, and the reward model learns nothing from them. `max_rounds` bounds the rounds (1: no further pairs are
    drawn), `max_pairs` the pairs of all rounds; `draw(n)` gives up to n new pairs. Raises LabellerDownError if nothing
    could be labelled.
    """
    session = LabelledSession()
    for number in range(max_rounds):
        missing = wanted - session.num_decided
        if max_pairs is not None:
            missing = min(missing, max_pairs - len(session))
        if missing <= 0:
            break
        pairs = list(draw(missing))
        if not pairs:
            break
        labels = await labeller.label(pairs)
        session.pairs += pairs
        session.labels += labels
        failed = [label for label in labels if label.error and label.error != SKIPPED]
        answered = [label for label in labels if is_answer(label) and label.text != IDENTICAL]
        if failed and not answered:
            if number == 0:
                raise LabellerDownError(
                    f"None of {len(failed)} pairs could be labelled: {failed[0].error.rstrip('.')}. Start the "
                    "labeller again."
                )
            break  # what was answered before is kept; the next session asks again
    return session


# Sessions on disk: `session-000001.parquet`, ... and the pictures of their segments, as PNG files named by hash.
#
# A file is written whole or not at all, and never changed: a process that is killed during a write leaves every
# earlier session readable.

_FREE_BYTES = 128 * 2**20  # that a session's table may take, whatever its size in the file; a long one takes 10 MiB
_FREE_PIXEL_BYTES, _PIXEL_RATIO = 2**30, 300  # rendered pictures take 3 to 100 times as much memory as their files
SEGMENT = pa.struct(
    [
        ("steps", pa.int32()),
        ("observations", pa.list_(pa.float32())),  # [steps × O], row by row
        ("actions", pa.list_(pa.float32())),  # [steps × A]
        ("true_rewards", pa.list_(pa.float32())),
        ("frames", pa.list_(pa.string())),  # SHA-256 of images/<sha256>.png, one per step; empty without pictures
    ]
)
Row = Mapping[str, Any]
T = TypeVar("T")


class SessionFiles:
    """The sessions in `folder`, numbered from 1. The columns `segments` of their rows hold segments (see SEGMENT)."""

    schema: pa.Schema
    segments: tuple[str, ...]

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def __len__(self) -> int:
        """How many sessions there are."""
        return len(self._files())

    def path(self, number: int) -> Path:
        """The file of a session."""
        return self.folder / f"session-{number:06d}.parquet"

    def write_rows(self, rows: Sequence[Row]) -> int:
        """Write one session; it is on the disk when this returns. Returns its number."""
        self.folder.mkdir(parents=True, exist_ok=True)
        number = len(self) + 1
        packed = [{**row, **{name: self._pack(row[name]) for name in self.segments}} for row in rows]
        table = pa.Table.from_pylist([{"session": number, **row} for row in packed], schema=self.schema)
        buffer = io.BytesIO()
        pq.write_table(table, buffer, compression="zstd")
        write_atomic(self.path(number), buffer.getvalue())
        return number

    def read_rows(self, number: int, use: Callable[[list[Row]], T], most: int | None = None) -> T:
        """`use` of the session's first `most` rows. Raises UserInputError if it is damaged or a picture is missing."""
        path = self.path(number)
        try:
            rows = read_parquet(pq.ParquetFile(path), free_bytes=_FREE_BYTES).slice(0, most).to_pylist()
            self._check_pictures(rows)
            return use([{**row, **{name: self._unpack(row[name]) for name in self.segments}} for row in rows])
        except ImageError as error:
            raise UserInputError(f"Cannot read the labels in {path}: a picture {error}.") from error
        except TooLargeError as error:
            raise UserInputError(f"Cannot read the labels in {path}: the file {error}.") from error
        except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
            raise UserInputError(f"Cannot read the labels in {path} ({error}).") from error

    def rewind(self, sessions: int) -> None:
        """Keep the first `sessions` sessions only, for a run that is resumed from a checkpoint of that time.

        Later ones are moved to `superseded/`.
        """
        for path in self._files()[sessions:]:
            self._supersede(path)

    def restore(self, saved: Path) -> None:
        """Take over the sessions of a checkpoint's folder, which a run in another folder lacks.

        A Tune trial that goes on from another trial's checkpoint has sessions of its own, which are moved aside.
        """
        if not saved.is_dir():
            return
        for session in sorted(saved.glob("session-*.parquet")):
            own = self.folder / session.name
            if own.exists() and not filecmp.cmp(session, own, shallow=False):
                self._supersede(own)
        link_tree(saved, self.folder)

    def _supersede(self, path: Path) -> None:
        """Move the file of a session to `superseded/`, under a name that is free there."""
        superseded = self.folder / "superseded"
        superseded.mkdir(exist_ok=True)
        names = (superseded / f"{path.stem}-{number}.parquet" for number in itertools.count(1))
        os.replace(path, next(name for name in names if not name.exists()))

    def _files(self) -> list[Path]:
        files = sorted(self.folder.glob("session-*.parquet"))
        if files and files[-1] != self.path(len(files)):
            raise UserInputError(f"The label store {self.folder} lacks sessions: it ends with {files[-1].name}.")
        return files

    def _pack(self, segment: Segment) -> dict[str, Any]:
        frames = [] if segment.frames is None else [self._write_picture(frame) for frame in segment.frames]
        return {
            "steps": len(segment),
            "observations": segment.observations.astype(np.float32).ravel(),
            "actions": segment.actions.astype(np.float32).ravel(),
            "true_rewards": segment.true_rewards.astype(np.float32),
            "frames": frames,
        }

    def _write_picture(self, frame: np.ndarray) -> str:
        image = encode(frame)
        path = self.folder / "images" / f"{image.sha256}.png"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_atomic(path, image.png)
        return image.sha256

    def _check_pictures(self, rows: list[dict[str, Any]]) -> None:
        """Raise ImageError where the session's pictures are much larger than their files, before any is decoded."""
        times = Counter(sha for row in rows for name in self.segments for sha in row[name]["frames"])
        pixel_bytes = file_bytes = 0
        for sha, count in times.items():
            data = image_bytes(f"images/{sha}.png", self.folder)
            width, height = check_header(data)
            pixel_bytes += 3 * width * height * count
            file_bytes += len(data) * count
        if pixel_bytes > max(_FREE_PIXEL_BYTES, _PIXEL_RATIO * file_bytes):
            raise ImageError(f"is much larger than its file: all of them take {pixel_bytes >> 20} MiB")

    def _unpack(self, row: dict[str, Any]) -> Segment:
        steps = row["steps"]
        # The names come from a file that others may have written; image_bytes refuses paths that leave the folder.
        frames = [pixels(image_bytes(f"images/{sha}.png", self.folder)) for sha in row["frames"]]
        return Segment(
            np.array(row["observations"], np.float32).reshape(steps, -1),
            np.array(row["actions"], np.float32).reshape(steps, -1),
            np.array(row["true_rewards"], np.float32),
            np.stack(frames) if frames else None,
        )


_SESSION = [("session", pa.int64()), ("step", pa.int64()), ("time", pa.float64())]  # seconds since 1970
_ANSWER = [("text", pa.string()), ("seconds", pa.float64()), ("error", pa.string())]


@dataclass(frozen=True, slots=True)
class StoredSession:
    """One session: `step` is the environment step at which it took place."""

    number: int
    step: int
    time: float
    pairs: list[SegmentPair]
    labels: list[Label]


class LabelStore(SessionFiles):
    """The labelled pairs of a run."""

    segments = ("first", "second")
    schema = pa.schema(
        [
            *_SESSION,
            *((name, SEGMENT) for name in segments),
            ("label", pa.int8()),  # null: an error
            ("probabilities", pa.list_(pa.float64())),
            ("answers", pa.list_(pa.int8())),
            *_ANSWER,
        ]
    )

    def append(self, pairs: Sequence[SegmentPair], labels: Sequence[Label], *, step: int, time: float) -> int:
        """Write one session; it is on the disk when this returns. Returns its number, from 1 on."""
        return self.write_rows(
            [
                {
                    "step": step,
                    "time": time,
                    "first": pair.first,
                    "second": pair.second,
                    "label": None if label.error else label.value,
                    "probabilities": label.probabilities,
                    "answers": list(label.answers),
                    **_answer_columns(label),
                }
                for pair, label in zip(pairs, labels, strict=True)
            ]
        )

    def read(self, number: int) -> StoredSession:
        """One session. Raises UserInputError if it is damaged or a picture is missing."""

        def session(rows: list[Row]) -> StoredSession:
            step, time = (rows[0]["step"], rows[0]["time"]) if rows else (0, 0.0)
            pairs = [SegmentPair(row["first"], row["second"]) for row in rows]
            return StoredSession(number, step, time, pairs, [_read_label(row) for row in rows])

        return self.read_rows(number, session)

    def example(self, number: int) -> SegmentPair | None:
        """The first pair of a session, without reading the others' pictures; None of an empty one. Raises as `read`."""
        return self.read_rows(
            number, lambda rows: SegmentPair(rows[0]["first"], rows[0]["second"]) if rows else None, most=1
        )

    def sessions(self) -> Iterator[StoredSession]:
        """All sessions, in order."""
        for number in range(1, len(self) + 1):
            yield self.read(number)


class ScoreStore(SessionFiles):
    """The scored segments of a run; the picture of a segment's last step is what was scored."""

    segments = ("segment",)
    schema = pa.schema(
        [*_SESSION, ("segment", SEGMENT), ("score", pa.float64()), *_ANSWER]
    )  # score null: unsure, or an error

    def append(self, segments: Sequence[Segment], scores: Sequence[Score], *, step: int, time: float) -> int:
        """Write one session; it is on the disk when this returns. Returns its number, from 1 on."""
        return self.write_rows(
            [
                {"step": step, "time": time, "segment": segment, "score": score.value, **_answer_columns(score)}
                for segment, score in zip(segments, scores, strict=True)
            ]
        )

    def read(self, number: int) -> tuple[list[Segment], list[Score]]:
        """One session. Raises UserInputError if it is damaged or a picture is missing."""

        def session(rows: list[Row]) -> tuple[list[Segment], list[Score]]:
            scores = [Score(row["score"], row["text"], row["seconds"], row["error"]) for row in rows]
            return [row["segment"] for row in rows], scores

        return self.read_rows(number, session)


def _answer_columns(answer: Label | Score) -> Row:
    return {
        "text": redact(answer.text).encode("utf-8", "replace").decode(),
        "seconds": answer.seconds,
        "error": answer.error.encode("utf-8", "replace").decode(),
    }


def _read_label(row: Row) -> Label:
    known = row["probabilities"]
    return Label(
        cast(LabelValue, -1 if row["label"] is None else row["label"]),
        (known[0], known[1], known[2]) if known else None,
        row["text"],
        row["seconds"],
        row["error"],
        tuple(cast(LabelValue, answer) for answer in row["answers"]),
    )


def label_cache(value: str | Path | None) -> Path | None:
    """The folder of a label cache, or None if `value` names none. Raises UserInputError if it is no label store."""
    if value is None or names_no_cache(value):
        return None
    folder = Path(value).expanduser()
    pickles = folder.suffix == ".pkl" or any(folder.glob("*.pkl"))
    if pickles and not any(folder.glob("session-*.parquet")):
        raise UserInputError(
            f"{folder} holds label caches of RL-VLM-F (.pkl), no label store: convert them with "
            f"`rl-vlm import-labels {folder} STORE --observations N` and give STORE as labels.cache."
        )
    if not folder.is_dir():
        raise UserInputError(f"There is no label cache {folder}: give the `labels` folder of a run, or null.")
    if not len(LabelStore(folder)):
        raise UserInputError(f"The label cache {folder} holds no sessions: give the `labels` folder of a run, or null.")
    return folder


# `vlm_query_log.csv`: one line per labelled pair, RL-VLM-F's columns first, ties and errors included.

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
        """Continue the file. With `keep_until`, lines of later iterations are removed first: a resumed run repeats
        them."""
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
