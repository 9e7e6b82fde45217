"""RunRecorder writes the results of a run into its folder."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_vlm import tracing
from rl_vlm.config import CommonConfig, LoggingSection, PolicyConfig, SFTConfig
from rl_vlm.files import AppendedFile, append_whole, cut_lines, to_jsonable, write_atomic
from rl_vlm.learning.plan import TokenRecord
from rl_vlm.models.images import TextSide
from rl_vlm.monitoring.sinks import Metrics, ProgressCsv, TensorBoardFile, start_wandb
from rl_vlm.monitoring.trajectories import choose_groups, write_evaluation, write_trajectories
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.types import TrajectoryGroup

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    from rl_vlm.monitoring.ray_metrics import RunMetrics


logger = logging.getLogger(__name__)

IMAGES = "trajectories/images"  # of all episodes that a run keeps
_LAST_SPANS_S = 2.0  # how long the end of a run waits for the collector


class RunRecorder:
    """Writes `progress.csv`, `eval.jsonl`, TensorBoard events, `trajectories/`, `result.json` and what `draw` draws.

    The run continues after `resumed_iteration`: later rows of an earlier process are removed, with None all. No full
    disk ends a run: failures are counted in `write_errors` and logged once per kind, and metrics that could not be
    written are written with the next ones. Files are written whole or not at all.
    """

    def __init__(
        self,
        folder: Path,
        run: CommonConfig | SFTConfig,
        resumed_iteration: int | None = None,
        draw: Callable[[Path], object] | None = None,
    ) -> None:
        self.folder, self._run, self._draw = folder, run, draw
        self.write_errors = 0
        self._warned: set[tuple[str, object]] = set()
        self._kinds_of_failure: set[str] = set()
        keep_until = -1 if resumed_iteration is None else resumed_iteration
        self._progress = ProgressCsv(folder / "progress.csv", keep_until)
        self._evaluations = AppendedFile(folder / "eval.jsonl")
        cut_lines(self._evaluations.path, lambda line: int(json.loads(line)["iteration"]), keep_until)
        dumps = (f"{kind}/iteration-*" for kind in ("trajectories", "evaluations", "traces"))
        for written in itertools.chain.from_iterable(map(folder.glob, dumps)):
            number = written.stem.removeprefix("iteration-")
            if number.isdecimal() and int(number) > keep_until:
                written.unlink()
        purge_from = None if resumed_iteration is None else resumed_iteration + 1
        self._tensorboard = TensorBoardFile(folder, purge_from) if run.logging.tensorboard else None
        self._wandb = start_wandb(folder, run, resume=resumed_iteration is not None)
        self._collector: BatchSpanProcessor | None = None
        self.ray: RunMetrics | None = None  # set once Ray is there, where metrics are Ray metrics too

    def log_iteration(self, iteration: int, metrics: Mapping[str, float]) -> None:
        with self._guard("progress.csv"):
            self._progress.add(iteration, metrics)
        self._log_scalars(iteration, metrics)

    def log_evaluation(self, iteration: int, results: Mapping[str, Any]) -> None:
        """Record everything in `eval.jsonl`, and numbers as scalars."""
        with self._guard("eval.jsonl"):
            entry = to_jsonable({"iteration": iteration, "time": time.time(), **results})
            self._evaluations.add(json.dumps(entry, ensure_ascii=False, allow_nan=False).encode() + b"\n")
        # Training logs reward and accuracy of a mixture's environments under the same names.
        parts = self._run.env.parts if isinstance(self._run, PolicyConfig) else {}
        numbers = {
            name if "/" in name and name.split("/")[1] not in parts else f"evaluation/{name}": float(value)
            for name, value in results.items()
            if isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
        }
        self._log_scalars(iteration, numbers, evaluated=True)

    def log_failures(self, iteration: int, failures: Mapping[str, str]) -> list[str]:
        """Keep why groups were lost in `failures.jsonl`; returns new reasons only, whatever numbers they have."""
        lines, fresh = [], []
        for group, reason in failures.items():
            kind = re.sub(r"\d+", "#", reason)
            if kind not in self._kinds_of_failure:
                fresh.append(reason)
            self._kinds_of_failure.add(kind)
            lines.append(json.dumps({"iteration": iteration, "group": group, "reason": reason}) + "\n")
        if lines:
            with self._guard("failures.jsonl"):
                append_whole(self.folder / "failures.jsonl", "".join(lines).encode())
        return fresh

    def log_message(self, iteration: int, text: str) -> None:
        """Keep the terminal's messages in `messages.jsonl`."""
        with self._guard("messages.jsonl"):
            line = json.dumps(to_jsonable({"iteration": iteration, "time": time.time(), "text": text}))
            append_whole(self.folder / "messages.jsonl", line.encode() + b"\n")

    def log_spans(self, iteration: int, spans: Sequence[tracing.Span]) -> None:
        """Write an iteration's spans, a line of OTLP JSON, and queue them for the collector, if there is one."""
        if not spans:
            return
        with self._guard("traces"):
            (self.folder / "traces").mkdir(exist_ok=True)
            line = json.dumps(tracing.document(spans), separators=(",", ":")).encode() + b"\n"
            append_whole(self.folder / "traces" / f"iteration-{iteration:06d}.jsonl", line)
        with self._guard("the trace to the collector", Exception):
            self._collector = self._collector or tracing.collector()
            if self._collector is not None:
                for span in spans:
                    self._collector.on_end(span)

    def dump_trajectories(
        self,
        iteration: int,
        groups: Sequence[TrajectoryGroup],
        tokens: TokenRecord,
        text: TextSide,
    ) -> None:
        """Keep about `logging.trajectories_per_dump` trajectories (whole groups)."""
        logging = self._run.logging
        assert isinstance(logging, LoggingSection)
        chosen = choose_groups(groups, logging.trajectories_per_dump, seed=iteration)
        with self._guard("trajectories"):
            write_trajectories(self.folder / "trajectories", iteration, [groups[k] for k in chosen], tokens, text)

    def dump_evaluation(
        self, iteration: int, items: Sequence[tuple[RolloutTask, TrajectoryGroup]], text: TextSide
    ) -> None:
        """Keep the episodes of held-out items; TensorBoard gets one of them."""
        assert isinstance(self._run, PolicyConfig)
        path, images = self.folder / "evaluations" / f"iteration-{iteration:06d}.parquet", self.folder / IMAGES
        with self._guard("evaluations"):
            write_evaluation(path, images, iteration, items, self._run.evaluation.category, text)
        if self._tensorboard is not None:
            with self._guard("TensorBoard"):
                self._tensorboard.add_episode(iteration, items[iteration % len(items)][1].trajectories[0])

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write `result.json`, draw the figure, close everything."""
        pending = {"progress.csv": self._progress.flush, "eval.jsonl": self._evaluations.add}
        if self._tensorboard is not None:
            pending["TensorBoard"] = self._tensorboard.add
        for name, flush in pending.items():
            with self._guard(name):
                flush()
        with self._guard("result.json"):
            text = json.dumps(to_jsonable(result), indent=2, ensure_ascii=False, allow_nan=False)
            write_atomic(self.folder / "result.json", text + "\n")
        if self._draw is not None:
            # An error in drawing must not make a successful run fail.
            with self._guard("the figure", Exception):
                self._draw(self.folder)
        self.close()

    def close(self) -> None:
        """End the run on Weights & Biases and send the last spans. A second call does nothing."""
        wandb, collector = self._wandb, self._collector
        self._wandb = self._collector = None
        if wandb is not None:
            with self._guard("Weights & Biases", Exception):
                wandb.finish()
        if collector is not None:
            sending = threading.Thread(target=collector.shutdown, daemon=True)  # waits for 30 s where nothing answers
            sending.start()
            sending.join(_LAST_SPANS_S)

    def evaluations(self) -> list[dict[str, Any]]:
        """Every evaluation of the run, in order."""
        return [json.loads(line) for line in self._evaluations.lines()]

    def has_evaluation(self, iteration: int) -> bool:
        return any(entry["iteration"] == iteration for entry in self.evaluations())

    def column(self, metric: str) -> list[float]:
        """A metric of every iteration that has it, in order."""
        return self._progress.column(metric)

    def _log_scalars(self, iteration: int, metrics: Metrics, *, evaluated: bool = False) -> None:
        if self._tensorboard is not None:
            with self._guard("TensorBoard"):
                self._tensorboard.add_metrics(iteration, metrics)
        if self._wandb is not None:
            # Its client raises errors of many kinds, which must not end the run.
            with self._guard("Weights & Biases", Exception):
                self._wandb.log({"iteration": iteration, **metrics})
        if self.ray is not None:
            with self._guard("Ray metrics", Exception):
                if evaluated:
                    self.ray.add_evaluation(metrics)
                else:
                    self.ray.add(iteration, metrics, self.write_errors)

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
