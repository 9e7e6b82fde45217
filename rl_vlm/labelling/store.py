"""A run's label store: the sessions on disk, to replay them without a VLM.

They are `session-000001.parquet`, ... and the pictures of their segments, PNG files named by hash. Each file is written
whole or not at all, and never changed.
"""

from __future__ import annotations

import filecmp
import io
import itertools
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rl_vlm.config.labels import names_no_cache
from rl_vlm.envs.images import BadImageError, check_header, image_bytes, pixels
from rl_vlm.envs.parquet import TooLargeError, read_parquet
from rl_vlm.files import link_tree, write_atomic
from rl_vlm.labelling.labels import Label, Score, Segment, SegmentPair, encode
from rl_vlm.safe_text import redact
from rl_vlm.types import UserInputError

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
        # The names come from a file that others may have written; image_bytes rejects paths that leave the folder.
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
