"""Sinks of metrics: progress.csv, files of JSON lines, TensorBoard event files, Weights & Biases.

A sink keeps entries that it could not write (a full disk) and tries again with the next entry. It raises the OSError
each time.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import os
import re
import secrets
import socket
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from rl_vlm.config import CommonConfig, SFTConfig
from rl_vlm.files import append_whole, to_jsonable, whole_lines, write_atomic

Metrics = Mapping[str, float]

logger = logging.getLogger(__name__)

MAX_PENDING = 10_000  # entries that are kept while the disk is full: hours of iterations, a few megabytes


class ProgressCsv:
    """One row of metrics per iteration. A metric that appears later widens the file; earlier rows are empty there."""

    def __init__(self, path: Path, keep_until: int = -1) -> None:
        """Continue the file after iteration `keep_until`; later rows are removed (all of them at -1)."""
        self._path = path
        self._pending: deque[tuple[int, Metrics]] = deque(maxlen=MAX_PENDING)
        lines = whole_lines(path)
        kept = [line for line in lines[1:] if _iteration_of_row(line) <= keep_until]
        _keep_lines(path, lines[:1] + kept if kept else [])
        self._columns: list[str] = next(csv.reader([lines[0].decode(errors="replace")])) if kept else []

    def add(self, iteration: int, metrics: Metrics) -> None:
        """Append a row."""
        self._pending.append((iteration, {name: float(value) for name, value in metrics.items()}))
        self.flush()

    def flush(self) -> None:
        """Write the pending entries."""
        if not self._pending:
            return
        columns = self._columns or ["iteration"]
        known = set(columns)
        new = list(dict.fromkeys(name for _, metrics in self._pending for name in metrics if name not in known))
        wider = columns + new
        rows = _csv([iteration, *(metrics.get(name, "") for name in wider[1:])] for iteration, metrics in self._pending)
        if new or not self._columns:
            # Cells hold no line ends, so a row is widened by adding empty cells to its line.
            old = [line + b"," * len(new) + b"\n" for line in whole_lines(self._path)[1:]]
            write_atomic(self._path, b"".join([_csv([wider]), *old, rows]))
        else:
            append_whole(self._path, rows)
        self._columns = wider
        self._pending.clear()

    def column(self, name: str) -> list[float]:
        """All values of a metric, in order, those included that could not be written yet."""
        written: list[float] = []
        try:
            for row in csv.DictReader(line.decode(errors="replace") for line in whole_lines(self._path)):
                with contextlib.suppress(ValueError):  # an empty cell, or one that a crash of the machine has damaged
                    written.append(float(row.get(name) or ""))
        except csv.Error as error:
            logger.warning("%s is damaged: %s", self._path, error)
        return written + [metrics[name] for _, metrics in self._pending if name in metrics]


class JsonLines:
    """One JSON object per line; every object has an `iteration`."""

    def __init__(self, path: Path, keep_until: int = -1) -> None:
        """Continue the file after iteration `keep_until`; later lines are removed (all of them at -1)."""
        self._path = path
        self._pending: deque[bytes] = deque(maxlen=MAX_PENDING)
        _keep_lines(path, [line for line in whole_lines(path) if _iteration_of_object(line) <= keep_until])

    def add(self, entry: Mapping[str, Any]) -> None:
        """Append a line."""
        self._pending.append(json.dumps(to_jsonable(entry), ensure_ascii=False, allow_nan=False).encode() + b"\n")
        self.flush()

    def flush(self) -> None:
        """Write the pending entries."""
        if self._pending:
            append_whole(self._path, b"".join(self._pending))
            self._pending.clear()

    def entries(self) -> list[dict[str, Any]]:
        """All objects, those included that could not be written yet."""
        return [json.loads(line) for line in [*whole_lines(self._path), *self._pending]]


class TensorBoardFile:
    """A TensorBoard event file, in the format of torch's SummaryWriter.

    SummaryWriter writes from a thread: after a full disk it never writes again and its file ends in half a record.
    This one appends whole records, in the thread of its caller.
    """

    def __init__(self, folder: Path, purge_from: int | None = None) -> None:
        """Start a file in `folder`. Entries of older files from iteration `purge_from` on are hidden."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        # TensorBoard reads the files of a folder in the order of their names.
        # A run may be resumed on a machine whose clock is behind.
        began = max(time.time(), max(map(_stamp, folder.glob("events.out.tfevents.*")), default=0.0) + 1e-3)
        unique = f"{began:.6f}.{socket.gethostname()}.{os.getpid()}.{secrets.token_hex(2)}"
        self._path = folder / f"events.out.tfevents.{unique}"
        self._pending: deque[bytes] = deque(maxlen=MAX_PENDING)
        self._header = _record(Event(wall_time=time.time(), file_version="brain.Event:2"))
        if purge_from is not None:
            start = SessionLog(status=SessionLog.START)
            self._header += _record(Event(wall_time=time.time(), step=purge_from, session_log=start))

    def add(self, iteration: int, metrics: Metrics) -> None:
        """Append one value per metric."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        self._pending.append(_record(Event(wall_time=time.time(), step=iteration, summary=Summary(value=values))))
        self.flush()

    def flush(self) -> None:
        """Write the pending entries."""
        if self._pending:
            append_whole(self._path, b"".join([self._header, *self._pending]))
            self._header = b""
            self._pending.clear()


def _stamp(path: Path) -> float:
    """When an event file says that it began; 0 for other names."""
    found = re.match(r"events\.out\.tfevents\.(\d+\.\d+)\.", path.name)
    return float(found[1]) if found else 0.0


class WandbRun:
    """A run on Weights & Biases. Without a network it is kept on disk, for `wandb sync`."""

    def __init__(self, folder: Path, run: CommonConfig | SFTConfig, resume: bool) -> None:
        """Raises ImportError without the package, and whatever `wandb.init` raises."""
        wandb = import_module("wandb")
        identity = folder / "wandb_id.txt"
        if not (resume and identity.is_file()):
            write_atomic(identity, secrets.token_hex(8))
        options: dict[str, Any] = {
            "project": run.logging.wandb_project,
            "name": run.name,
            "id": identity.read_text().strip(),
            "resume": "allow",
            "dir": str(folder),
            "config": run.model_dump(mode="json"),
        }
        try:
            self._run = wandb.init(**options, settings=wandb.Settings(init_timeout=30))
        except (wandb.errors.Error, OSError):
            self._run = wandb.init(**{**options, "resume": None}, mode="offline")
        self._run.define_metric("*", step_metric="iteration")

    def add(self, iteration: int, metrics: Metrics) -> None:
        """Log one value per metric."""
        self._run.log({"iteration": iteration, **metrics})

    def close(self) -> None:
        """Finish the run on the server."""
        self._run.finish()


def _csv(rows: Iterable[Sequence[Any]]) -> bytes:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerows(rows)
    return buffer.getvalue().encode()


def _record(event: Any) -> bytes:
    """An event with length and checksums, in the format of event files."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()


def _keep_lines(path: Path, lines: list[bytes]) -> None:
    """Keep only these lines of the file; without lines it is removed. A file that holds nothing else is not written."""
    if not lines:
        path.unlink(missing_ok=True)
    elif path.stat().st_size > sum(len(line) + 1 for line in lines):
        write_atomic(path, b"".join(line + b"\n" for line in lines))


def _iteration_of_row(line: bytes) -> float:
    """The iteration of a row; infinity, so that it is removed, for a line that a crash of the machine has damaged."""
    try:
        return int(line.split(b",", 1)[0])
    except ValueError:
        return float("inf")


def _iteration_of_object(line: bytes) -> float:
    """As `_iteration_of_row`, of a JSON object."""
    try:
        return int(json.loads(line)["iteration"])
    except (ValueError, TypeError, KeyError):
        return float("inf")
