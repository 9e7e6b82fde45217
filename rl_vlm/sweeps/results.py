"""What came out of a sweep: tables of trials and settings, a figure, the best configuration and adapter."""

from __future__ import annotations

import json
import logging
import math
import shutil
import statistics
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from ray.tune import Callback, Result
from ray.tune.result import SHOULD_CHECKPOINT

from rl_vlm.config import TrainConfig, save_config
from rl_vlm.config.sweep import HELD_OUT, SEED, SweepConfig, changed
from rl_vlm.files import csv_lines, whole_lines, write_atomic
from rl_vlm.models.trained import trained_folder
from rl_vlm.plots.sweep import draw_settings
from rl_vlm.safe_text import printable
from rl_vlm.statistics import student_half_width

logger = logging.getLogger(__name__)

_ERRORS = "error.txt"  # Tune's file of a trial's errors


@dataclass(frozen=True, slots=True)
class TrialResult:
    """One trial: its settings (dotted keys) and the metric by iteration, 0 being before training. `best` may be NaN."""

    name: str
    settings: dict[str, Any]
    points: list[tuple[int, float]]
    iterations: int
    best: float
    seconds: float
    finished: bool
    error: str
    checkpoint: Path | None

    @property
    def before(self) -> float:
        return self.points[0][1] if self.points and self.points[0][0] == 0 else math.nan

    @property
    def last(self) -> float:
        return self.points[-1][1] if self.points else math.nan


def read_results(
    results: Iterable[Result], configs: Iterable[Mapping[str, Any]], sweep: SweepConfig
) -> list[TrialResult]:
    """The trials that Tune knows, each with its configuration, best first; those without a value come last."""
    trials = [_read_trial(result, config, sweep) for result, config in zip(results, configs, strict=True)]
    return sorted(trials, key=lambda trial: (math.isnan(trial.best), sweep.sign * trial.best, trial.name))


def _read_trial(result: Result, config: Mapping[str, Any], sweep: SweepConfig) -> TrialResult:
    folder = Path(result.path)
    rows = list(_rows(folder / "result.json"))
    # Of held-out metrics each row repeats the last evaluation.
    new = [row for row in rows if row.get(SHOULD_CHECKPOINT, True)] if sweep.metric in HELD_OUT else rows
    points = {int(row["training_iteration"]): metric_value(row, sweep.metric) for row in new}
    if rows:
        points[0] = metric_value(rows[0], sweep.metric.replace("held_out/", "held_out_before/"))
    values = {iteration: value for iteration, value in sorted(points.items()) if not math.isnan(value)}
    # The value before training is no result of training: it counts only where there is no other.
    trained = {iteration: value for iteration, value in values.items() if iteration} or values
    kept = {int(metrics["training_iteration"]): Path(saved.path) for saved, metrics in result.best_checkpoints or ()}
    measured = sorted(kept.keys() & trained.keys(), reverse=True)  # of equally good ones the latest
    choose = max if sweep.mode == "max" else min
    last = rows[-1] if rows else {"training_iteration": 0, "time_total_s": 0.0}
    return TrialResult(
        name=folder.name,
        settings={key: config[key] for key in sweep.space if key in config},
        points=list(values.items()),
        iterations=int(last["training_iteration"]),
        best=choose(trained.values(), default=math.nan),
        seconds=float(last["time_total_s"]),
        finished=bool(rows) and result.error is None,
        error=str(result.error).strip().splitlines()[-1][:300] if result.error is not None else "",
        checkpoint=kept[choose(measured, key=trained.__getitem__)] if measured else None,
    )


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Tune's results. After a kill it writes the next one behind half a line: both are lost then."""
    for line in whole_lines(path):
        try:
            yield json.loads(line)
        except ValueError:
            logger.warning("A damaged line of %s is left out.", path)


def metric_value(row: dict[str, Any], metric: str) -> float:
    """A metric of one of Tune's results; NaN without it."""
    value: Any = row
    for part in metric.split("/"):
        value = value.get(part) if isinstance(value, dict) else None
    return float(value) if isinstance(value, int | float) else math.nan


def write_results(folder: Path, trials: Sequence[TrialResult], config: TrainConfig, sweep: SweepConfig) -> None:
    """Write results.csv, results.md, results.png and best/."""
    settings = group_by_setting(trials, sweep)
    columns = ("trial", *sweep.space, "before", "last", "best", "iterations", "seconds", "finished", "error")
    rows = [
        (
            trial.name, *map(trial.settings.get, sweep.space), trial.before, trial.last, trial.best,
            trial.iterations, round(trial.seconds, 1), trial.finished, trial.error,
        )
        for trial in trials
    ]  # fmt: skip
    write_atomic(folder / "results.csv", csv_lines([columns, *rows]))
    write_atomic(folder / "results.md", _markdown(trials, settings, sweep))
    if settings:
        curves = {name: [trial.points for trial in members] for name, members in settings.items()}
        draw_settings(curves, sweep.metric, folder / "results.png")
    best = next((trial for trial in trials if not math.isnan(trial.best)), None)
    if best is not None:
        (folder / "best").mkdir(exist_ok=True)
        save_config(changed(config, best.settings), folder / "best" / "config.yaml")
        trained = trained_folder(best.checkpoint) if best.checkpoint is not None else None
        if trained is not None:
            shutil.copytree(trained, folder / "best" / trained.name, dirs_exist_ok=True)


def group_by_setting(trials: Sequence[TrialResult], sweep: SweepConfig) -> dict[str, list[TrialResult]]:
    """The finished trials that differ in their seed alone by their name ("lr 0.002, rank 16"); the best mean first."""
    groups: dict[str, list[TrialResult]] = {}
    shown = {key: key.rsplit(".", 1)[-1] for key in sweep.space if key != SEED}
    for trial in trials:
        if trial.points and trial.finished:
            values = (f"{name} {_short(trial.settings.get(key))}" for key, name in shown.items())
            groups.setdefault(", ".join(values) or "all", []).append(trial)
    return dict(sorted(groups.items(), key=lambda group: sweep.sign * statistics.fmean(_last(group[1]))))


def _last(trials: Sequence[TrialResult]) -> list[float]:
    return [trial.last for trial in trials]


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _markdown(trials: Sequence[TrialResult], settings: Mapping[str, Sequence[TrialResult]], sweep: SweepConfig) -> str:
    finished = sum(trial.finished for trial in trials)
    least, most = (0.0, 1.0) if sweep.metric.endswith("/accuracy") else (-math.inf, math.inf)
    lines = [
        f"`{sweep.metric}` of {len(trials)} trials, of which {finished} finished; `results.csv` has each.\n",
        "| setting | runs | mean of the last | 95 % interval |",
        "|---|---|---|---|",
    ]
    for name, members in settings.items():
        mean, interval = statistics.fmean(_last(members)), "one run"
        if len(members) > 1:
            half = float(student_half_width(np.array(_last(members))))
            interval = f"{max(mean - half, least):.3f} to {min(mean + half, most):.3f}"
        lines.append(f"| {name} | {len(members)} | {mean:.3f} | {interval} |")
    return "\n".join(lines) + "\n"


def report_best(trials: Sequence[TrialResult], metric: str, out: Path) -> None:
    """Print how many trials finished, the best one, and where everything is."""
    best, finished = trials[0], sum(trial.finished for trial in trials)
    settings = printable(", ".join(f"{key}={value}" for key, value in best.settings.items()))
    print(f"{finished} of {len(trials)} trials finished; best {metric} {best.best:.3f} with {settings}")
    print(f"See {out / 'results.md'}, {out / 'results.png'} and {out / 'best'}.")


_PROCESS = uuid.uuid4().hex  # of this process; numbers of processes come again, in a container every time


class SweepProgress(Callback):
    """Prints a line when a trial starts, is evaluated, ends or fails."""

    def __init__(self, sweep: SweepConfig) -> None:
        self._metric, self._keys = sweep.metric, tuple(sweep.space)
        self._process = _PROCESS

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Failures, which Tune saves, are counted anew in another process."""
        if self._process != _PROCESS:
            self._process = _PROCESS
            for trial in trials:
                trial.run_metadata.num_failures = 0

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        settings = ", ".join(f"{key}={_short(trial.config[key])}" for key in self._keys if key in trial.config)
        self._say(trial, f"starts or goes on with {settings}")

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        if result.get(SHOULD_CHECKPOINT):  # after an evaluation
            value = metric_value(result, self._metric)
            self._say(trial, f"iteration {result['training_iteration']}: {self._metric} {value:.3f}")

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._say(trial, "has ended")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        self._say(trial, f"failed: see {Path(trial.path) / _ERRORS}")

    def _say(self, trial: Any, what: str) -> None:
        print(f"{time.strftime('%H:%M:%S')}  {trial} {what}", flush=True)
