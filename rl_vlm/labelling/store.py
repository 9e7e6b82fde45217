"""Labels: what control agent, labeller and reward model exchange, and a run's label store, to replay without a VLM."""

from __future__ import annotations

import filecmp
import io
import itertools
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from rl_vlm.config.labels import names_no_cache
from rl_vlm.envs.images import BadImageError, check_header, image_bytes, pixels
from rl_vlm.envs.parquet import TooLargeError, read_parquet
from rl_vlm.files import append_whole, csv_lines, cut_lines, link_tree, write_atomic
from rl_vlm.safe_text import csv_cell, redact
from rl_vlm.types import EncodedImage, UserInputError

# 0: the first of a pair is better, 1: the second, -1: equal or undecided.
LabelValue = Literal[0, 1, -1]
# What a reward model sees: frames uint8 [N, H, W, 3], or observations and actions float32 [N, O + A].
InputKind = Literal["image", "state_action"]


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity: arrays have no one truth value
class Segment:
    """T consecutive steps of one episode."""

    observations: np.ndarray  # float32 [T, O]
    actions: np.ndarray  # float32 [T, A]
    true_rewards: np.ndarray  # float32 [T], for scripted teachers, logs and evaluation only
    frames: np.ndarray | None = None  # uint8 [T, H, W, 3], where they are drawn

    def __len__(self) -> int:
        return len(self.actions)


@dataclass(frozen=True, slots=True, eq=False)
class SegmentPair:
    """Two segments of equal length, to be compared."""

    first: Segment
    second: Segment


@dataclass(frozen=True, slots=True)
class Label:
    """A labeller's answer for one pair. One with an error is no answer and is never trained on."""

    value: LabelValue
    probabilities: tuple[float, ...] | None = None  # first better, second better, neither; where known
    text: str = ""
    seconds: float = 0.0
    error: str = ""  # SKIPPED: on purpose
    answers: tuple[LabelValue, ...] = ()  # of each order in which the pair was shown, in terms of the pair as it is

    @property
    def is_decided(self) -> bool:
        return not self.error and self.value != -1

    def swapped(self) -> Label:
        other = cast("dict[LabelValue, LabelValue]", {0: 1, 1: 0, -1: -1})
        known = self.probabilities
        return replace(
            self,
            value=other[self.value],
            probabilities=(known[1], known[0], known[2]) if known else None,
            answers=tuple(other[answer] for answer in self.answers),
        )


SKIPPED = "skipped"  # the `error` of a pair that a scripted teacher skipped
IDENTICAL = "the pictures are identical"  # the `text` of a label that needed no question


@dataclass(frozen=True, slots=True)
class Score:
    """A labeller's score in [0, 1] for one picture; None where it was unsure, or where `error` is set."""

    value: float | None
    text: str = ""
    seconds: float = 0.0
    error: str = ""

    @property
    def is_decided(self) -> bool:
        return not self.error and self.value is not None

    def swapped(self) -> Score:
        """The score of the opposite goal."""
        return self if self.value is None else replace(self, value=1 - self.value)


class Labeller:
    """Compares segments, and may score single pictures. A random state is part of `state`, for an exact resume."""

    stats: Any = None  # what labelling has cost, where that is counted

    async def label(self, pairs: Sequence[SegmentPair]) -> list[Label]:
        """One label per pair, in order; all pairs are in flight at once."""
        raise NotImplementedError  # abstract: a labeller answers pairs, scores, or both

    async def score(self, frames: Sequence[np.ndarray]) -> list[Score]:
        """One score per frame (uint8 [H, W, 3]), in order; all frames are in flight at once."""
        raise NotImplementedError  # abstract: see `label`

    def set_margin(self, mean_return: float, segment_length: int, horizon: int) -> None:
        """The recent mean return of episodes, and how long segments and episodes are; thresholds may follow them."""

    def state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""


def picture_of(segment: Segment, frames: int = 1) -> np.ndarray:
    """uint8 [H, frames × W, 3]: pictures of the segment side by side, evenly spaced, its last one last. Raises
    UserInputError if it has none."""
    if segment.frames is None:
        raise UserInputError("These segments have no pictures: give the environment a camera or a render function.")
    steps = len(segment)
    indices = [max(steps - 1 - back * (steps // frames), 0) for back in reversed(range(frames))]
    return np.concatenate([segment.frames[index] for index in indices], axis=1)


def encode(picture: np.ndarray) -> EncodedImage:
    """The PNG of a picture uint8 [H, W, 3] and its hash, for a labeller and for the label store."""
    return EncodedImage.from_pil(Image.fromarray(picture))


# Sessions on disk: `session-000001.parquet`, ... and the pictures of their segments, as PNG files named by hash, each
# written whole or not at all, and never changed.

_FREE_BYTES = 128 * 2**20  # that a session's table may take, whatever its size in the file; a long one takes 10 MiB
_FREE_PIXEL_BYTES, _PIXEL_RATIO = 2**30, 300  # rendered pictures take 3 to 100 times as much memory as their files
_ARRAYS = ("observations", "actions", "true_rewards")
SEGMENT = pa.struct(
    [
        ("steps", pa.int32()),
        ("observations", pa.list_(pa.float32())),  # [steps × O], row by row
        ("actions", pa.list_(pa.float32())),  # [steps × A]
        ("true_rewards", pa.list_(pa.float32())),
        ("frames", pa.list_(pa.string())),  # SHA-256 of images/<sha256>.png, one per step; empty without pictures
    ]
)
_TEXT = (("text", pa.string()), ("seconds", pa.float64()), ("error", pa.string()))  # of every answer


class SessionFiles:
    """The sessions in `folder`, numbered from 1: rows of the segments that were asked about, with the answers."""

    segments: tuple[str, ...]  # columns, each as SEGMENT says
    answer: type[Any]
    answers: tuple[tuple[str, pa.DataType], ...]  # the columns of the answers

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def __len__(self) -> int:
        return len(self._files())

    def path(self, number: int) -> Path:
        return self.folder / f"session-{number:06d}.parquet"

    def append(
        self, examples: Sequence[Any], answers: Sequence[Any], *, step: int, time: float, learned: Sequence[Any] = ()
    ) -> int:
        """Write one session of environment step `step`; it is on the disk when this returns. Returns its number.
        `learned`: the returns of each pair by the reward model before the session, for readers of the run."""
        self.folder.mkdir(parents=True, exist_ok=True)
        number = len(self) + 1
        rows = []
        for example, answer, before in zip(examples, answers, learned or [None] * len(answers), strict=True):
            row = {"session": number, "step": step, "time": time, **asdict(answer), "text": redact(answer.text)}
            row["learned"] = before
            for name in ("text", "error"):
                row[name] = row[name].encode("utf-8", "replace").decode()
            parts = (example,) if isinstance(example, Segment) else (example.first, example.second)
            rows.append(row | {name: self._pack(part) for name, part in zip(self.segments, parts, strict=True)})
        buffer = io.BytesIO()
        columns = [
            ("session", pa.int64()),
            ("step", pa.int64()),
            ("time", pa.float64()),
            ("learned", pa.list_(pa.float64())),
        ]
        schema = pa.schema([*columns, *((name, SEGMENT) for name in self.segments), *self.answers])
        pq.write_table(pa.Table.from_pylist(rows, schema=schema), buffer, compression="zstd")
        write_atomic(self.path(number), buffer.getvalue())
        return number

    def read(self, number: int, most: int | None = None) -> tuple[list[Any], list[Any]]:
        """What a session asked about and the (first `most`) answers. Raises UserInputError if it is damaged."""
        path = self.path(number)
        try:
            rows = read_parquet(pq.ParquetFile(path), free_bytes=_FREE_BYTES).slice(0, most).to_pylist()
            self._check_pictures(rows)
            read = [([self._unpack(row[name]) for name in self.segments], self._answer_of(row)) for row in rows]
        except (BadImageError, TooLargeError) as error:
            what = "a picture" if isinstance(error, BadImageError) else "the file"
            raise UserInputError(f"Cannot read the labels in {path}: {what} {error}.") from error
        except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
            raise UserInputError(f"Cannot read the labels in {path} ({error}).") from error
        examples = [SegmentPair(*parts) if len(parts) == 2 else parts[0] for parts, _ in read]
        return examples, [answer for _, answer in read]

    def sessions(self) -> Iterator[tuple[list[Any], list[Any]]]:
        return (self.read(number) for number in range(1, len(self) + 1))

    def rewind(self, sessions: int) -> None:
        """Keep the first `sessions` sessions, as a checkpoint knows them; later ones move to `superseded/`."""
        for path in self._files()[sessions:]:
            self._supersede(path)

    def restore(self, saved: Path) -> None:
        """Take over the sessions of a checkpoint's folder. A Tune trial that goes on from another trial's checkpoint
        has sessions of its own, which are moved aside."""
        if not saved.is_dir():
            return
        for session in sorted(saved.glob("session-*.parquet")):
            own = self.folder / session.name
            if own.exists() and not filecmp.cmp(session, own, shallow=False):
                self._supersede(own)
        link_tree(saved, self.folder)

    def _supersede(self, path: Path) -> None:
        superseded = self.folder / "superseded"
        superseded.mkdir(exist_ok=True)
        names = (superseded / f"{path.stem}-{number}.parquet" for number in itertools.count(1))
        os.replace(path, next(name for name in names if not name.exists()))

    def _files(self) -> list[Path]:
        files = sorted(self.folder.glob("session-*.parquet"))
        if files and files[-1] != self.path(len(files)):
            raise UserInputError(f"The label store {self.folder} lacks sessions: it ends with {files[-1].name}.")
        return files

    def _answer_of(self, row: Mapping[str, Any]) -> Any:
        values = {name: row[name] for name, _ in self.answers}
        return self.answer(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})

    def _pack(self, segment: Segment) -> dict[str, Any]:
        arrays = {name: getattr(segment, name).astype(np.float32).ravel() for name in _ARRAYS}
        frames = [] if segment.frames is None else [self._write_picture(frame) for frame in segment.frames]
        return {"steps": len(segment), **arrays, "frames": frames}

    def _write_picture(self, frame: np.ndarray) -> str:
        image = encode(frame)
        path = self.folder / "images" / f"{image.sha256}.png"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_atomic(path, image.png)
        return image.sha256

    def _check_pictures(self, rows: list[dict[str, Any]]) -> None:
        """Raise BadImageError where the session's pictures are much larger than their files, before any is decoded."""
        times = Counter(sha for row in rows for name in self.segments for sha in row[name]["frames"])
        pixel_bytes = file_bytes = 0
        for sha, count in times.items():
            data = image_bytes(f"images/{sha}.png", self.folder)
            width, height = check_header(data)
            pixel_bytes += 3 * width * height * count
            file_bytes += len(data) * count
        if pixel_bytes > max(_FREE_PIXEL_BYTES, _PIXEL_RATIO * file_bytes):
            raise BadImageError(f"is much larger than its file: all of them take {pixel_bytes >> 20} MiB")

    def _unpack(self, row: dict[str, Any]) -> Segment:
        observations, actions, rewards = (np.array(row[name], np.float32) for name in _ARRAYS)
        # The names come from a file that others may have written; image_bytes refuses paths that leave the folder.
        frames = [pixels(image_bytes(f"images/{sha}.png", self.folder)) for sha in row["frames"]]
        steps, pictures = row["steps"], np.stack(frames) if frames else None
        return Segment(observations.reshape(steps, -1), actions.reshape(steps, -1), rewards, pictures)


class LabelStore(SessionFiles):
    """The labelled pairs of a run."""

    segments, answer = ("first", "second"), Label
    answers = (
        ("value", pa.int8()), ("probabilities", pa.list_(pa.float64())), ("answers", pa.list_(pa.int8())), *_TEXT
    )  # fmt: skip


class ScoreStore(SessionFiles):
    """The scored segments of a run; the picture of a segment's last step is what was scored."""

    segments, answer, answers = ("segment",), Score, (("value", pa.float64()), *_TEXT)


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
MAX_CELL = 50_000  # characters of an answer that are kept: Python's csv reads cells of up to 131,072


class StepCsv:
    """A CSV file that a resumed run continues; the column `step` and those before it hold numbers."""

    def __init__(self, path: Path, columns: Sequence[str], step: str = "step") -> None:
        self._path, self._columns, self._step = path, tuple(columns), columns.index(step)

    def rewind(self, step: int) -> None:
        """Remove the rows of later steps, which the run repeats; all of them at -1."""
        # Not with csv, which refuses long cells.
        cut_lines(self._path, lambda line: int(line.split(b",", self._step + 1)[self._step]), step, head=1)

    def add(self, *rows: Sequence[Any]) -> None:
        """Append rows, whole or not at all."""
        started = self._path.exists() and self._path.stat().st_size > 0
        append_whole(self._path, csv_lines(rows if started else [self._columns, *rows]))


def query_log(path: Path, more_columns: Sequence[str] = ()) -> StepCsv:
    return StepCsv(path, (*COLUMNS, *more_columns), "train_iter")


def true_return(segment: Segment) -> float:
    """The undiscounted sum of the true rewards."""
    return float(np.sum(segment.true_rewards, dtype=np.float64))


def agreement(returns: Sequence[tuple[float, float]], labels: Sequence[Label]) -> list[bool | None]:
    """Whether each label prefers the higher return, of the pairs whose returns are known and differ and whose label is
    no error; None: it is undecided."""
    return [
        (label.value == 1) == (second > first) if label.is_decided else None
        for (first, second), label in zip(returns, labels, strict=True)
        if np.isfinite(second - first) and first != second and not label.error
    ]


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
