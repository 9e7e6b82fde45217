"""The figures of a run as Ray metrics, for Prometheus, Grafana, alerts and `rl-vlm top`.

Ray's own thread sends what was set to the metrics agent of the node every few seconds, so that no iteration waits for it. It sends a
gauge once after it was set, and the agent forgets what is not sent again: a thread here sets all of them anew.
"""

from __future__ import annotations

import logging
import math
import shutil
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from ray.util.metrics import Gauge

from rl_vlm.config import CommonConfig
from rl_vlm.monitoring.figure_names import EVAL, PREFIX, STATE, Series, series_of
from rl_vlm.monitoring.vitals import MismatchGrowth, MovingAverage, RewardTrend

POLICY = "policy"  # the one policy that a run trains, as in its Serve application
MAX_SERIES = 400
_NAME_LENGTH = 80
_TAGS = ("run", "policy", "part")
_AGAIN_S = 1.0  # the agent forgets after two of Ray's intervals, 20 s unless they are set shorter
_JOIN_S = 5.0

logger = logging.getLogger(__name__)


class RayFigures:
    """Sets a gauge for every figure, tagged with run, policy and part, until `close`. Ray is initialised.

    `total`: iterations of the whole run, or steps of a preference run.
    """

    def __init__(self, run: CommonConfig, folder: Path, total: int) -> None:
        self._run, self._folder = run, folder
        self._gauges: dict[str, Gauge] = {}
        self._series: dict[tuple[str, str], tuple[Gauge, dict[str, str]]] = {}
        self._told_of_too_many = False
        self._set_last: dict[tuple[Gauge, tuple[str, ...]], tuple[dict[str, str], float]] = {}
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._trend, self._mismatch, self._seconds = RewardTrend(), MismatchGrowth(), MovingAverage()
        self._progress, self._running = time.time(), False
        self._row_at = time.monotonic()  # the wall clock may be set meanwhile
        info = Gauge(f"{PREFIX}run_info", STATE["run_info"], tag_keys=(*_TAGS, "algorithm", "env", "model"))
        self._put(
            info,
            {**self._tags("train"), "algorithm": run.algorithm_name, "env": run.title, "model": run.model.path},
            1.0,
        )
        self._set_state(
            run_active=1,
            iterations=total,
            iteration_seconds=0.0,
            max_policy_lag=run.max_policy_lag,
            last_progress_timestamp_seconds=self._progress,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._set_again, name="ray-metrics", daemon=True)
        self._thread.start()

    def recall(self, rewards: Iterable[float], mismatches: Iterable[float]) -> None:
        """Know the figures of a run before it was resumed: its start stays its start."""
        for reward in rewards:
            self._trend.add(reward)
        for mismatch in mismatches:
            self._mismatch.add(mismatch)

    def add(self, iteration: int, metrics: Mapping[str, float], write_errors: int = 0) -> None:
        """Set the figures of an iteration, and what is computed from them."""
        now, row_at = time.time(), time.monotonic()
        if self._running:  # before the first row the run was starting
            self._seconds.add(row_at - self._row_at)
        self._progress, self._row_at, self._running = now, row_at, True
        for name, value in metrics.items():
            self._set(name, "", value)
        state = {} if "reward/mean" not in metrics else self._trend.add(metrics["reward/mean"])
        growth = self._mismatch.add(metrics.get("mismatch/kl", math.nan))
        disk = shutil.disk_usage(self._folder)
        self._set_state(
            iteration=iteration,
            iteration_seconds=self._seconds.value or 0.0,
            last_progress_timestamp_seconds=now,
            disk_free_bytes=disk.free,
            disk_total_bytes=disk.total,
            write_errors=write_errors,
            **state,
            **({} if growth is None else {"mismatch_growth": growth}),
        )

    def add_evaluation(self, numbers: Mapping[str, float]) -> None:
        """Set the figures of an evaluation, with the part `eval`."""
        for name, value in numbers.items():
            self._set(name, EVAL, value)
        # An evaluation is progress, too, and counts for no iteration.
        self._progress, self._row_at = time.time(), time.monotonic()
        self._set_state(last_progress_timestamp_seconds=self._progress)

    def close(self) -> None:
        """Say that the run has ended. The agent forgets its figures soon afterwards."""
        self._closing.set()
        self._thread.join(_JOIN_S)
        self._set_state(run_active=0)

    def _set_again(self) -> None:
        while not self._closing.wait(_AGAIN_S):
            with self._lock:
                known = [(gauge, tags, value) for (gauge, _), (tags, value) in self._set_last.items()]
            for gauge, tags, value in known:
                gauge.set(value, tags)

    def _put(self, gauge: Gauge, tags: dict[str, str], value: float) -> None:
        with self._lock:
            self._set_last[gauge, tuple(tags.values())] = tags, value
        gauge.set(value, tags)

    def _tags(self, part: str) -> dict[str, str]:
        return {"run": self._run.name, "policy": POLICY, "part": part}

    def _set_state(self, **values: float) -> None:
        for name, value in values.items():
            self._put(self._gauge(Series(PREFIX + name, "", "train", STATE[name])), self._tags("train"), float(value))

    def _set(self, figure: str, part: str, value: float) -> None:
        if not math.isfinite(value):
            return
        found = self._series.get((figure, part)) or self._new_series(figure, part)
        if found is not None:
            self._put(*found, float(value))

    def _new_series(self, figure: str, part: str) -> tuple[Gauge, dict[str, str]] | None:
        if len(self._series) >= MAX_SERIES:
            if not self._told_of_too_many:
                self._told_of_too_many = True
                logger.warning("More than %d figures: %s and further ones are no Ray metrics.", MAX_SERIES, figure)
            return None
        series = series_of(figure, part)
        tags = self._tags(series.part)
        if series.name:
            tags["name"] = series.name[:_NAME_LENGTH]
        found = self._series[figure, part] = self._gauge(series), tags
        return found

    def _gauge(self, series: Series) -> Gauge:
        if series.metric not in self._gauges:
            keys = (*_TAGS, "name") if series.name else _TAGS
            self._gauges[series.metric] = Gauge(series.metric, series.description, tag_keys=keys)
        return self._gauges[series.metric]
