"""The label store of a run: labelled pairs, or scored segments. Labels can be replayed without a VLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pyarrow as pa

from rl_vlm.config.labels import names_no_cache
from rl_vlm.labelling.session_files import SEGMENT, Row, SessionFiles
from rl_vlm.labelling.types import Label, LabelValue, Score, Segment, SegmentPair
from rl_vlm.safe_text import redact
from rl_vlm.types import UserInputError

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

    def sessions(self, start: int = 1) -> Iterator[StoredSession]:
        """All sessions from number `start` on, in order."""
        for number in range(start, len(self) + 1):
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
