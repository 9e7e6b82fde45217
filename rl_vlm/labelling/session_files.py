"""Sessions on disk: `session-000001.parquet`, ... and the pictures of their segments, as PNG files named by hash.

A file is written whole or not at all, and never changed: a process that is killed during a write leaves every earlier
session readable.
"""

from __future__ import annotations

import io
import itertools
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rl_vlm.envs.images import ImageError, check_header, image_bytes, pixels
from rl_vlm.envs.parquet_budget import TooLargeError, read_file
from rl_vlm.files import write_atomic
from rl_vlm.labelling.pictures import encode
from rl_vlm.labelling.types import Segment
from rl_vlm.types import UserInputError

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
            rows = read_file(pq.ParquetFile(path), _FREE_BYTES).slice(0, most).to_pylist()
            self._check_pictures(rows)
            return use([{**row, **{name: self._unpack(row[name]) for name in self.segments}} for row in rows])
        except ImageError as error:
            raise UserInputError(f"Cannot read the labels in {path}: a picture {error}.") from error
        except TooLargeError as error:
            raise UserInputError(f"Cannot read the labels in {path}: the file {error}.") from error
        except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
            raise UserInputError(f"Cannot read the labels in {path} ({error}).") from error

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
