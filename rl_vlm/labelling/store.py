"""The label store: labelled sessions as parquet files, pictures as files named by hash; replayed without a VLM.

One file per session, which is written whole or not at all: a process that is killed during a write leaves every
earlier session readable. Sessions are numbered, and no file is changed after it was written.
"""

from __future__ import annotations

import io
import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from rl_vlm.config.labels import names_no_cache
from rl_vlm.envs.images import ImageError, check_header, image_bytes, pixels
from rl_vlm.envs.parquet_budget import TooLargeError, read_file
from rl_vlm.files import write_atomic
from rl_vlm.labelling.types import Label, LabelValue, Segment, SegmentPair
from rl_vlm.safe_text import redact
from rl_vlm.types import EncodedImage, UserInputError

_SIDES = ("first", "second")
_FREE_BYTES = 128 * 2**20  # that a session's table may take, whatever its size in the file; a long one takes 10 MiB
_FREE_PIXEL_BYTES, _PIXEL_RATIO = 2**30, 300  # rendered pictures take 3 to 100 times as much memory as their files
_SEGMENT = pa.struct(
    [
        ("steps", pa.int32()),
        ("observations", pa.list_(pa.float32())),  # [steps × O], row by row
        ("actions", pa.list_(pa.float32())),  # [steps × A]
        ("true_rewards", pa.list_(pa.float32())),
        ("frames", pa.list_(pa.string())),  # SHA-256 of images/<sha256>.png, one per step; empty without pictures
    ]
)
SCHEMA = pa.schema(
    [
        ("session", pa.int64()),
        ("step", pa.int64()),
        ("time", pa.float64()),  # seconds since 1970
        ("first", _SEGMENT),
        ("second", _SEGMENT),
        ("label", pa.int8()),  # null: an error
        ("probabilities", pa.list_(pa.float32())),
        ("answers", pa.list_(pa.int8())),
        ("text", pa.string()),
        ("seconds", pa.float64()),
        ("error", pa.string()),
    ]
)


@dataclass(frozen=True, slots=True)
class StoredSession:
    """One session: `step` is the environment step at which it took place."""

    number: int
    step: int
    time: float
    pairs: list[SegmentPair]
    labels: list[Label]


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


class LabelStore:
    """The labels of a run in `folder`: `session-000001.parquet`, ... and `images/`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def __len__(self) -> int:
        """How many sessions there are."""
        return len(self._files())

    def append(self, pairs: Sequence[SegmentPair], labels: Sequence[Label], *, step: int, time: float) -> int:
        """Write one session; it is on the disk when this returns. Returns its number, from 1 on."""
        self.folder.mkdir(parents=True, exist_ok=True)
        number = len(self) + 1
        rows = [
            {
                "session": number,
                "step": step,
                "time": time,
                "first": self._write_segment(pair.first),
                "second": self._write_segment(pair.second),
                "label": None if label.error else label.value,
                "probabilities": label.probabilities,
                "answers": list(label.answers),
                "text": redact(label.text).encode("utf-8", "replace").decode(),
                "seconds": label.seconds,
                "error": label.error.encode("utf-8", "replace").decode(),
            }
            for pair, label in zip(pairs, labels, strict=True)
        ]
        buffer = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), buffer, compression="zstd")
        write_atomic(self._path(number), buffer.getvalue())
        return number

    def read(self, number: int) -> StoredSession:
        """One session. Raises UserInputError if it is damaged or a picture is missing."""
        return self._read(number, None)

    def example(self, number: int) -> SegmentPair | None:
        """The first pair of a session, without reading the others' pictures; None of an empty one. Raises as `read`."""
        return next(iter(self._read(number, 1).pairs), None)

    def _read(self, number: int, most: int | None) -> StoredSession:
        path = self._path(number)
        try:
            rows = read_file(pq.ParquetFile(path), _FREE_BYTES).slice(0, most).to_pylist()
            self._check_pictures(rows)
            return StoredSession(
                number,
                rows[0]["step"] if rows else 0,
                rows[0]["time"] if rows else 0.0,
                [SegmentPair(*(self._read_segment(row[side]) for side in _SIDES)) for row in rows],
                [_read_label(row) for row in rows],
            )
        except ImageError as error:
            raise UserInputError(f"Cannot read the labels in {path}: a picture {error}.") from error
        except TooLargeError as error:
            raise UserInputError(f"Cannot read the labels in {path}: the file {error}.") from error
        except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
            raise UserInputError(f"Cannot read the labels in {path} ({error}).") from error

    def sessions(self, start: int = 1) -> Iterator[StoredSession]:
        """All sessions from number `start` on, in order."""
        for number in range(start, len(self) + 1):
            yield self.read(number)

    def rewind(self, sessions: int) -> int:
        """Keep the first `sessions` sessions only, for a run that is resumed from a checkpoint of that time.

        Later ones are moved to `superseded/`; returns their number.
        """
        later = self._files()[sessions:]
        for path in later:
            self.supersede(path)
        return len(later)

    def supersede(self, path: Path) -> None:
        """Move the file of a session to `superseded/`, under a name that is free there."""
        superseded = self.folder / "superseded"
        superseded.mkdir(exist_ok=True)
        names = (superseded / f"{path.stem}-{number}.parquet" for number in itertools.count(1))
        os.replace(path, next(name for name in names if not name.exists()))

    def _path(self, number: int) -> Path:
        return self.folder / f"session-{number:06d}.parquet"

    def _files(self) -> list[Path]:
        files = sorted(self.folder.glob("session-*.parquet"))
        if files and files[-1] != self._path(len(files)):
            raise UserInputError(f"The label store {self.folder} lacks sessions: it ends with {files[-1].name}.")
        return files

    def _write_segment(self, segment: Segment) -> dict[str, Any]:
        frames = [] if segment.frames is None else [self._write_image(frame) for frame in segment.frames]
        return {
            "steps": len(segment),
            "observations": segment.observations.astype(np.float32).ravel(),
            "actions": segment.actions.astype(np.float32).ravel(),
            "true_rewards": segment.true_rewards.astype(np.float32),
            "frames": frames,
        }

    def _write_image(self, frame: np.ndarray) -> str:
        image = EncodedImage.from_pil(Image.fromarray(frame))
        path = self.folder / "images" / f"{image.sha256}.png"
        if not path.exists():
            path.parent.mkdir(exist_ok=True)
            write_atomic(path, image.png)
        return image.sha256

    def _check_pictures(self, rows: list[dict[str, Any]]) -> None:
        """Raise ImageError where the session's pictures are much larger than their files, before any is decoded."""
        times = Counter(sha for row in rows for side in _SIDES for sha in row[side]["frames"])
        held = files = 0
        for sha, count in times.items():
            data = image_bytes(f"images/{sha}.png", self.folder)
            width, height = check_header(data)
            held, files = held + 3 * width * height * count, files + len(data) * count
        if held > max(_FREE_PIXEL_BYTES, _PIXEL_RATIO * files):
            raise ImageError(f"is much larger than its file: all of them take {held >> 20} MiB")

    def _read_segment(self, row: dict[str, Any]) -> Segment:
        steps = row["steps"]
        # The names come from a file that others may have written; image_bytes refuses paths that leave the folder.
        frames = [pixels(image_bytes(f"images/{sha}.png", self.folder)) for sha in row["frames"]]
        return Segment(
            np.array(row["observations"], np.float32).reshape(steps, -1),
            np.array(row["actions"], np.float32).reshape(steps, -1),
            np.array(row["true_rewards"], np.float32),
            np.stack(frames) if frames else None,
        )


def _read_label(row: dict[str, Any]) -> Label:
    known = row["probabilities"]
    return Label(
        cast(LabelValue, -1 if row["label"] is None else row["label"]),
        (known[0], known[1], known[2]) if known else None,
        row["text"],
        row["seconds"],
        row["error"],
        tuple(cast(LabelValue, answer) for answer in row["answers"]),
    )


class LabelReplay:
    """Returns the sessions of a store one after the other, in place of a labeller.

    As in the original, the cached pairs replace those of the policy: a replayed session is trained on as it was labelled.
    """

    def __init__(self, folder: str | Path) -> None:
        self._store = LabelStore(folder)
        self._next = 1

    def next_session(self) -> StoredSession | None:
        """The next session, or None after the last one."""
        if self._next > len(self._store):
            return None
        session = self._store.read(self._next)
        self._next += 1
        return session

    def state(self) -> dict[str, int]:
        """The number of the next session, as JSON."""
        return {"next": self._next}

    def set_state(self, state: dict[str, int]) -> None:
        """Go on from `state`."""
        self._next = int(state["next"])
