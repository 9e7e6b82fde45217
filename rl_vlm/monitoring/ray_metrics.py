"""The metrics of a run as Ray metrics, for Prometheus, Grafana, alerts and `rl-vlm top`.

Ray's own thread sends a gauge to the node's metrics agent once after it was set, and the agent forgets what is not sent
again: a thread here sets all of them anew.
"""

from __future__ import annotations

import logging
import math
import shutil
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from ray.util.metrics import Gauge

from rl_vlm.config import PolicyConfig, TrainConfig
from rl_vlm.monitoring.display import Trend
from rl_vlm.serving.ray_metrics import RayMetrics
from rl_vlm.types import POLICY

logger = logging.getLogger(__name__)

MAX_SERIES = 400
_NAME_LENGTH = 80
_AGAIN_S = 1.0  # the agent forgets after two of Ray's intervals, 20 s unless they are set shorter
_JOIN_S = 5.0

# Which Ray metric a metric of a run becomes; bounded, so that no run floods a metrics agent. One with a fixed name has
# its own (`reward/mean` → `rl_vlm_reward_mean`); others share that of their first part and differ in the tag `name`
# (`dropped/too_old` → `rl_vlm_dropped{name="too_old"}`). Prometheus puts `ray_` in front.

# First part of a metric's name -> the last parts that have a Ray metric of their own.
OWN: Mapping[str, str] = {
    "reward": "mean std learned zero_advantage_groups",
    "policy": (
        "loss kl approx_kl entropy token_logprob_mean clip_fraction ratio_max grad_norm lr optimizer_steps "
        "skipped_steps first_ratio_error kl_coef alpha alpha_loss updates"
    ),
    "mismatch": "kl token_mult_prob_error masked",
    "value": "loss return explained_variance",
    "critic": "loss q reward",
    "rollout": (
        "turns tokens tokens_per_s truncated groups lag_max oldest_token utilisation under_way waiting "
        "episodes length success steps_per_s"
    ),
    "weights": "version publish_s acked",
    "curriculum": "stage stages solve_rate episodes",
    "sight": "gap kl_blank accuracy_gap",
    "judge": "win_rate order_bias first_rate unclear refused requests tokens seconds",
    "labels": "total asked usable undecided errors seconds accuracy",
    "reward_model": "accuracy loss examples gradient_steps",
    "replay": "rows mib",
}
# First parts whose other last parts share one Ray metric; `metric` is for unknown first parts.
FAMILIES = (
    *OWN, "accuracy", "env", "evaluation", "items", "mixture", "time", "memory", "dropped", "restarts", "metric",
)  # fmt: skip
EVAL = "eval"  # the part of what an evaluation found
_PARTS = {
    "policy": "learner", "mismatch": "learner", "value": "learner", "critic": "learner",
    "weights": "serving", "labels": "preference", "reward_model": "preference", "replay": "preference",
    "time": "train", "memory": "train", "restarts": "train", "metric": "train", "evaluation": EVAL, "items": EVAL,
}  # fmt: skip


class Series(NamedTuple):
    """A Ray metric (without `ray_rl_vlm_`), its tag `name` (empty for a metric of its own) and its part."""

    metric: str
    name: str
    part: str


def series_of(metric: str, part: str = "") -> Series:
    """The Ray metric of a run's metric; `part` in place of the one that its name says."""
    first, _, rest = metric[:_NAME_LENGTH].partition("/")
    if rest in OWN.get(first, "").split():
        return Series(f"{first}_{rest}", "", part or _PARTS.get(first, "rollout"))
    if first not in FAMILIES or not rest:
        first, rest = "metric", metric[:_NAME_LENGTH]
    return Series(first, rest, part or _PARTS.get(first, "rollout"))


class RunMetrics:
    """Sets a gauge for every metric, tagged with run, policy and part, until `close`. Ray is initialised."""

    def __init__(self, config: TrainConfig, folder: Path, total: int) -> None:
        self._folder = folder
        self._ray = RayMetrics(run=config.name, policy=POLICY)
        self._values: dict[Series, tuple[Gauge, dict[str, str], float]] = {}
        self._warned_of_too_many = False
        self._closing = threading.Event()
        self._reward, self._mismatch, self._seconds = Trend(), Trend(), Trend()
        self._row_at: float | None = None  # by the clock that is never set; None: the run is starting
        about = {"algorithm": config.algorithm.name, "env": config.env.title, "model": config.model.path}
        self._set(Series("run_info", "", "train"), 1.0, "what is trained", about)
        self._set_state(
            run_active=1,
            iterations=total,
            iteration_seconds=0.0,
            max_policy_lag=config.rollout.max_policy_lag if isinstance(config, PolicyConfig) else 0,
            last_progress_timestamp_seconds=time.time(),
        )
        self._thread = threading.Thread(target=self._repeat, name="ray-metrics", daemon=True)
        self._thread.start()

    def recall(self, rewards: Iterable[float], mismatches: Iterable[float]) -> None:
        """Take over the metrics of a run before it was resumed."""
        for trend, values in ((self._reward, rewards), (self._mismatch, mismatches)):
            for value in values:
                trend.add(value)

    def add(self, iteration: int, metrics: Mapping[str, float], write_errors: int = 0) -> None:
        now = time.monotonic()
        if self._row_at is not None:
            self._seconds.add(now - self._row_at)
        self._row_at = now
        self._set_metrics(metrics)
        reward, disk = self._reward, shutil.disk_usage(self._folder)
        reward.add(metrics.get("reward/mean", math.nan))
        self._set_state(
            iteration=iteration,
            iteration_seconds=self._seconds.smoothed or 0.0,
            last_progress_timestamp_seconds=time.time(),
            disk_free_bytes=disk.free,
            disk_total_bytes=disk.total,
            write_errors=write_errors,
            reward_start=reward.start,
            reward_smoothed=reward.smoothed,
            reward_best=reward.best,
            mismatch_growth=self._mismatch.growth(metrics.get("mismatch/kl", math.nan)),
        )

    def add_evaluation(self, numbers: Mapping[str, float]) -> None:
        self._set_metrics(numbers, EVAL)
        # An evaluation is progress, too, and counts for no iteration.
        self._row_at = self._row_at and time.monotonic()
        self._set_state(last_progress_timestamp_seconds=time.time())

    def close(self) -> None:
        """Say that the run has ended. The agent forgets its metrics soon afterwards."""
        self._closing.set()
        self._thread.join(_JOIN_S)
        self._set_state(run_active=0)

    def _repeat(self) -> None:
        while not self._closing.wait(_AGAIN_S):
            for gauge, tags, value in list(self._values.values()):  # others may be added meanwhile
                gauge.set(value, tags)

    def _set_state(self, **values: float | None) -> None:
        for name, value in values.items():
            if value is not None:
                self._set(Series(name, "", "train"), value, "state of a run")

    def _set_metrics(self, metrics: Mapping[str, float], part: str = "") -> None:
        for metric, value in metrics.items():
            if not math.isfinite(value):
                continue
            series = series_of(metric, part)
            if series in self._values or len(self._values) < MAX_SERIES:
                self._set(series, value, "of progress.csv or eval.jsonl")
            elif not self._warned_of_too_many:
                self._warned_of_too_many = True
                logger.warning("More than %d metrics: %s and further ones are no Ray metrics.", MAX_SERIES, metric)

    def _set(self, series: Series, value: float, description: str, more: Mapping[str, str] | None = None) -> None:
        tags = {"part": series.part, **(more or {})} | ({"name": series.name} if series.name else {})
        gauge = self._ray.metric(Gauge, series.metric, description, keys=tuple(tags))
        self._values[series] = gauge, tags, float(value)
        gauge.set(float(value), tags)
