"""RunRecorder writes the results of a run into its folder."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_vlm.config import CommonConfig, LoggingSection, PolicyConfig, SFTConfig
from rl_vlm.files import append_whole, to_jsonable, write_atomic
from rl_vlm.monitoring import otlp
from rl_vlm.monitoring.sinks import JsonLines, ProgressCsv, TensorBoardFile, WandbRun
from rl_vlm.monitoring.trajectories import choose_groups, write_trajectories
from rl_vlm.tracing import Span
from rl_vlm.types import TrajectoryGroup

if TYPE_CHECKING:
    from rl_vlm.monitoring.ray_metrics import RayFigures

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

logger = logging.getLogger(__name__)


def _trace_name(iteration: int) -> str:
    return f"iteration-{iteration:06d}.jsonl"


def _iteration(file: Path) -> int:
    """The number in `iteration-000123.x`. Names of seven digits do not sort as their numbers do."""
    number = file.stem.removeprefix("iteration-")
    return int(number) if number.isdecimal() else -1


class RunRecorder:
    """Writes `progress.csv`, `eval.jsonl`, TensorBoard events, `trajectories/`, `result.json` and what `draw` draws.

    `folder` exists. The run continues after `resumed_iteration`, and later rows of an earlier process are removed; with
    None all rows of an earlier run in the folder are removed. `draw(folder)` is called at the end.

    No method but the constructor raises an OSError: a full disk must not end a run. Failures are counted in `write_errors`
    and logged once per kind; metrics that could not be written are kept and written with the next ones. Files are written
    whole or not at all. With WANDB_API_KEY set, metrics also go to Weights & Biases.
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
        self.ray: RayFigures | None = None  # set once Ray is there, where figures are Ray metrics too

    def log_iteration(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one training iteration."""
        with self._guard("progress.csv"):
            self._progress.add(iteration, metrics)
        self._log_scalars(iteration, metrics)
        if self.ray is not None:
            with self._guard("Ray metrics", Exception):
                self.ray.add(iteration, metrics, self.write_errors)

    def log_evaluation(self, iteration: int, results: Mapping[str, Any]) -> None:
        """Record a held-out evaluation: everything in `eval.jsonl`, numbers as scalars, bare names and a mixture's under `evaluation/`."""
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

    def log_spans(self, iteration: int, spans: Sequence[Span]) -> None:
        """Keep the spans that came in an iteration, one line of OTLP JSON, and send them to the collector, if there is one."""
        if not spans:
            return
        with self._guard("traces"):
            (self.folder / "traces").mkdir(exist_ok=True)
            line = json.dumps(otlp.document(spans, self._run.name), separators=(",", ":")).encode() + b"\n"
            append_whole(self.folder / "traces" / _trace_name(iteration), line)
        with self._guard("the trace to the collector", Exception):
            otlp.export(spans, self._run.name)

    def _evaluation_tag(self, name: str) -> str:
        """The name of an evaluation's figure among the scalars."""
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
        """Write `result.json`, draw the figure, close everything. `result` holds a `status`; its extra keys are kept."""
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
        """End the run on Weights & Biases; all files are closed already. A second call does nothing."""
        wandb, self._wandb = self._wandb, None
        if wandb is not None:
            with self._guard("Weights & Biases", Exception):
                wandb.close()

    def evaluations(self) -> list[dict[str, Any]]:
        """Every evaluation of the run, resumed parts included, in order."""
        return self._evaluations.entries()

    def has_evaluation(self, iteration: int) -> bool:
        """Whether an evaluation at this iteration is recorded."""
        return any(entry["iteration"] == iteration for entry in self.evaluations())

    def rewards(self) -> list[float]:
        """The mean reward of every iteration, resumed parts included, in order."""
        return self.column("reward/mean")

    def column(self, figure: str) -> list[float]:
        """A figure of every iteration that has it, resumed parts included, in order."""
        return self._progress.column(figure)

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
