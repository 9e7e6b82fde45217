"""What a sweep prints while it runs: a line when a trial starts, is evaluated, ends or fails."""

from __future__ import annotations

import contextlib
import json
import math
import time
import uuid
from collections.abc import Collection
from pathlib import Path
from typing import Any

from ray.tune import Callback

from rl_vlm.config.sweep import SweepConfig
from rl_vlm.files import write_atomic
from rl_vlm.sweeps.results import ERRORS, PARAMS, figure

_PROCESS = uuid.uuid4().hex  # of this process; numbers of processes come again, in a container every time


class SweepProgress(Callback):
    """Prints to standard output. Trials are numbered in the order in which they first start, or fail before that.

    It also writes the settings of a trial that failed before it started into its folder, for the table of results.
    """

    def __init__(self, sweep: SweepConfig) -> None:
        self._metric, self._sign = sweep.metric, sweep.sign
        self._keys: Collection[str] = tuple(sweep.space)
        self._numbers: dict[str, int] = {}
        self._told: dict[str, float] = {}
        self._best = math.nan
        self._trials = sweep.num_trials
        self._started = time.monotonic()
        self._process = _PROCESS

    def get_state(self) -> dict[str, Any]:
        """What Tune saves with the sweep and gives back to `set_state` where it goes on; without it each number would be given twice."""
        return {"numbers": dict(self._numbers), "told": dict(self._told), "best": self._best}

    def set_state(self, state: dict[str, Any]) -> None:
        self._numbers, self._told, self._best = dict(state["numbers"]), dict(state["told"]), state["best"]

    def on_step_begin(self, iteration: int, trials: list[Any], **info: Any) -> None:
        """Failures are counted anew in a sweep that goes on in another process: Tune saves this callback and the counts."""
        if self._process != _PROCESS:
            self._process, self._started = _PROCESS, time.monotonic()
            for trial in trials:
                trial.run_metadata.num_failures = 0

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        known = trial.trial_id in self._numbers
        number = self._numbers.setdefault(trial.trial_id, len(self._numbers) + 1)
        settings = ", ".join(f"{key}={_short(trial.config[key])}" for key in self._keys if key in trial.config)
        self._say(number, f"{'goes on' if known else 'starts'} with {settings}")

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        value = figure(result, self._metric)
        if math.isnan(value) or value == self._told.get(trial.trial_id):
            return
        self._told[trial.trial_id] = value
        if math.isnan(self._best) or self._sign * value < self._sign * self._best:
            self._best = value
        done = f"iteration {result['training_iteration']}: {self._metric} {value:.3f} (best so far {self._best:.3f})"
        self._say(self._numbers.get(trial.trial_id, 0), done)

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        ended = 1 + sum(other.is_finished() for other in trials if other is not trial)
        self._say(self._numbers.get(trial.trial_id, 0), f"has ended; {ended} of {self._trials} have")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        number = self._numbers.setdefault(trial.trial_id, len(self._numbers) + 1)
        params = Path(trial.local_path) / PARAMS
        if not params.is_file():
            # Tune writes them when a trial starts, which one whose settings contradict each other never does.
            settings = {key: trial.config[key] for key in self._keys if key in trial.config}
            with contextlib.suppress(OSError):  # a full disk: the other trials go on
                write_atomic(params, json.dumps(settings, default=str))
        self._say(number, f"failed: see {Path(trial.path) / ERRORS}")

    def _say(self, number: int, what: str) -> None:
        seconds = int(time.monotonic() - self._started)
        print(f"{seconds // 60:3d}:{seconds % 60:02d}  trial {number} {what}", flush=True)


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
