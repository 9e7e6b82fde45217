"""RunRecorder writes the results of a run into its folder."""

from __future__ import annotations

import contextlib
import csv
import errno
import io
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_vlm import tracing
from rl_vlm.config import CommonConfig, LoggingSection, PolicyConfig, SFTConfig
from rl_vlm.files import append_whole, to_jsonable, whole_lines, write_atomic
from rl_vlm.monitoring.trajectories import choose_groups, write_trajectories
from rl_vlm.types import TrajectoryGroup

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from rl_vlm.monitoring.ray_metrics import RayMetrics


# Sinks of metrics: progress.csv, files of JSON lines, TensorBoard event files, Weights & Biases.
#
# A sink keeps entries that it could not write (a full disk) and tries again with the next entry. It raises the OSError
# each time.

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


_LAST_SPANS_S = 2.0  # how long the end of a run waits for the collector
STATUSES = ("done", "interrupted", "failed")

# result.json holds at least these keys; a run that ended before a value was known keeps the one here.
_RESULT: dict[str, Any] = {
    "status": None,
    "iterations": 0,
    "train_seconds": 0.0,
    "accuracy_before": None,
    "accuracy_after": None,
    "reward_before": None,
    "reward_after": None,
    "policy_version": 0,
    "trajectories": 0,
    "dropped": {},
    "restarts": {},
}


def _trace_name(iteration: int) -> str:
    return f"iteration-{iteration:06d}.jsonl"


def _iteration(file: Path) -> int:
    """The number in `iteration-000123.x`. Names of seven digits do not sort as their numbers do."""
    number = file.stem.removeprefix("iteration-")
    return int(number) if number.isdecimal() else -1


MAX_FAILURES = 10_000


class RunRecorder:
    """Writes `progress.csv`, `eval.jsonl`, TensorBoard events, `trajectories/`, `result.json` and what `draw` draws.

    `folder` exists. The run continues after `resumed_iteration`, and later rows of an earlier process are removed; with
    None all rows of an earlier run in the folder are removed. `draw(folder)` is called at the end.

    No method but the constructor raises an OSError: a full disk must not end a run. Failures are counted in
    `write_errors` and logged once per kind; metrics that could not be written are kept and written with the next ones.
    Files are written whole or not at all. With WANDB_API_KEY set, metrics also go to Weights & Biases.
    """

    def __init__(
        self,
        folder: Path,
        run: CommonConfig | SFTConfig,
        resumed_iteration: int | None = None,
        draw: Callable[[Path], object] | None = None,
    ) -> None:
        self.folder = folder
        self._draw = draw
        self.write_errors = 0
        self._run = run
        self._warned: set[tuple[str, object]] = set()
        self._failures: Counter[str] = Counter()
        keep_until = -1 if resumed_iteration is None else resumed_iteration
        self._progress = ProgressCsv(folder / "progress.csv", keep_until)
        self._evaluations = JsonLines(folder / "eval.jsonl", keep_until)
        for dump in (folder / "trajectories").glob("iteration-*.parquet"):
            if _iteration(dump) > keep_until:
                dump.unlink()
        purge_from = None if resumed_iteration is None else resumed_iteration + 1
        self._tensorboard = TensorBoardFile(folder, purge_from) if run.logging.tensorboard else None
        self._wandb = self._start_wandb(resume=resumed_iteration is not None)
        for written in (folder / "traces").glob("iteration-*.jsonl"):
            if _iteration(written) > keep_until:
                written.unlink()
        self._collector: BatchSpanProcessor | None = None
        self.ray: RayMetrics | None = None  # set once Ray is there, where metrics are Ray metrics too

    def log_iteration(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one training iteration."""
        with self._guard("progress.csv"):
            self._progress.add(iteration, metrics)
        self._log_scalars(iteration, metrics)
        if self.ray is not None:
            with self._guard("Ray metrics", Exception):
                self.ray.add(iteration, metrics, self.write_errors)

    def log_evaluation(self, iteration: int, results: Mapping[str, Any]) -> None:
        """Record a held-out evaluation: everything in `eval.jsonl`, numbers as scalars, bare names and a mixture's
        under `evaluation/`.
        """
        with self._guard("eval.jsonl"):
            self._evaluations.add({"iteration": iteration, "time": time.time(), **results})
        numbers = {
            self._evaluation_tag(name): float(value)
            for name, value in results.items()
            if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
        }
        self._log_scalars(iteration, numbers)
        if self.ray is not None:
            with self._guard("Ray metrics", Exception):
                self.ray.add_evaluation(numbers)

    def log_failures(self, iteration: int, failures: Mapping[str, str]) -> list[str]:
        """Keep why groups were lost in `failures.jsonl`, and return the reasons of new kinds, which differ in more than
        numbers. Of one process at most MAX_FAILURES are kept."""
        lines, fresh = [], []
        for group, reason in failures.items():
            kind = re.sub(r"\d+", "#", reason)
            if kind not in self._failures:
                fresh.append(reason)
            self._failures[kind] += 1
            if self._failures.total() <= MAX_FAILURES:
                lines.append(json.dumps({"iteration": iteration, "group": group, "reason": reason}) + "\n")
        if lines:
            with self._guard("failures.jsonl"):
                append_whole(self.folder / "failures.jsonl", "".join(lines).encode())
        return fresh

    def log_spans(self, iteration: int, spans: Sequence[tracing.Span]) -> None:
        """Write the spans that came in an iteration, one line of OTLP JSON, and queue them for the collector, if there
        is one.
        """
        if not spans:
            return
        with self._guard("traces"):
            (self.folder / "traces").mkdir(exist_ok=True)
            line = json.dumps(tracing.document(spans), separators=(",", ":")).encode() + b"\n"
            append_whole(self.folder / "traces" / _trace_name(iteration), line)
        with self._guard("the trace to the collector", Exception):
            if self._collector is None and tracing.collector_is_named():
                self._collector = tracing.collector()
            if self._collector is not None:
                for span in spans:
                    self._collector.on_end(span)

    def _evaluation_tag(self, name: str) -> str:
        """The name of an evaluation's metric among the scalars."""
        # Training logs reward and accuracy of a mixture's environments under the same names.
        parts = self._run.env.parts if isinstance(self._run, PolicyConfig) else {}
        return name if "/" in name and name.split("/")[1] not in parts else f"evaluation/{name}"

    def dump_trajectories(
        self,
        iteration: int,
        groups: Sequence[TrajectoryGroup],
        advantages: Sequence[np.ndarray],
        decode: Callable[[np.ndarray], str],
    ) -> None:
        """Keep about `logging.trajectories_per_dump` of the trajectories (whole groups), with their images.

        `advantages` holds one array [G] per group; `decode` turns token ids into text.
        """
        folder, logging = self.folder / "trajectories", self._run.logging
        assert isinstance(logging, LoggingSection)
        chosen = choose_groups(groups, logging.trajectories_per_dump, seed=iteration)
        with self._guard("trajectories"):
            folder.mkdir(parents=True, exist_ok=True)
            write_trajectories(
                folder, iteration, [groups[place] for place in chosen], [advantages[place] for place in chosen], decode
            )

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write `result.json`, draw the figure, close everything.

        `result` holds a `status`; its extra keys are kept.
        """
        if result.get("status") not in STATUSES:
            raise ValueError(f"status is {result.get('status')!r}; it must be one of {', '.join(STATUSES)}.")
        for name, sink in (("progress.csv", self._progress), ("eval.jsonl", self._evaluations)):
            with self._guard(name):
                sink.flush()
        if self._tensorboard is not None:
            with self._guard("TensorBoard"):
                self._tensorboard.flush()
        with self._guard("result.json"):
            text = json.dumps(to_jsonable({**_RESULT, **result}), indent=2, ensure_ascii=False, allow_nan=False)
            write_atomic(self.folder / "result.json", text + "\n")
        if self._draw is not None:
            # An error in drawing must not make a successful run fail.
            with self._guard("the figure", Exception):
                self._draw(self.folder)
        self.close()

    def close(self) -> None:
        """End the run on Weights & Biases and send the last spans; all files are closed already.

        A second call does nothing.
        """
        wandb, self._wandb = self._wandb, None
        if wandb is not None:
            with self._guard("Weights & Biases", Exception):
                wandb.close()
        collector, self._collector = self._collector, None
        if collector is not None:
            sending = threading.Thread(target=collector.shutdown, daemon=True)  # waits for 30 s where nothing answers
            sending.start()
            sending.join(_LAST_SPANS_S)

    def evaluations(self) -> list[dict[str, Any]]:
        """Every evaluation of the run, resumed parts included, in order."""
        return self._evaluations.entries()

    def has_evaluation(self, iteration: int) -> bool:
        """Whether an evaluation at this iteration is recorded."""
        return any(entry["iteration"] == iteration for entry in self.evaluations())

    def column(self, metric: str) -> list[float]:
        """A metric of every iteration that has it, resumed parts included, in order."""
        return self._progress.column(metric)

    def _log_scalars(self, iteration: int, metrics: Mapping[str, float]) -> None:
        if self._tensorboard is not None:
            with self._guard("TensorBoard"):
                self._tensorboard.add(iteration, metrics)
        if self._wandb is not None:
            # Its client raises errors of many kinds, which must not end the run.
            with self._guard("Weights & Biases", Exception):
                self._wandb.add(iteration, metrics)

    def _start_wandb(self, resume: bool) -> WandbRun | None:
        if not os.environ.get("WANDB_API_KEY"):
            return None
        try:
            return WandbRun(self.folder, self._run, resume)
        except ImportError:
            logger.warning("WANDB_API_KEY is set and wandb is not installed: run `pip install 'rl-vlm[wandb]'`.")
        except Exception as error:
            logger.warning("Weights & Biases is off for this run: %s: %s", type(error).__name__, error)
        return None

    @contextlib.contextmanager
    def _guard(self, what: str, kind: type[Exception] = OSError) -> Iterator[None]:
        try:
            yield
        except kind as error:
            self.write_errors += 1
            code = error.errno if isinstance(error, OSError) else type(error)
            if (what, code) in self._warned:
                return
            self._warned.add((what, code))
            full = " Free some space." if code in (errno.ENOSPC, errno.EDQUOT) else ""
            reason = (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}"
            logger.warning("Cannot write %s in %s: %s.%s The run goes on.", what, self.folder, reason, full)
