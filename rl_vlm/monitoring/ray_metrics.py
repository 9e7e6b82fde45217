"""The metrics of a run as Ray metrics, for Prometheus, Grafana, alerts and `rl-vlm top`.

Ray's own thread sends what was set to the metrics agent of the node every few seconds, so that no iteration waits for
it. It sends a gauge once after it was set, and the agent forgets what is not sent again: a thread here sets all of them
anew.
"""

from __future__ import annotations

import logging
import math
import shutil
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from rl_vlm.config import PolicyConfig, TrainConfig
from rl_vlm.monitoring.display import MismatchGrowth, MovingAverage, RewardTrend

if TYPE_CHECKING:
    from ray.util.metrics import Gauge  # `doctor` and `top` read the names below without Ray

# Which Ray metric a metric of a run becomes: a bounded list of names, so that no run can flood a metrics agent.
#
# A metric with a fixed name has a Ray metric of its own (`reward/mean` → `rl_vlm_reward_mean`). Others, whose last part
# an environment, a reason or a variant names, share the Ray metric of their first part and differ in the tag `name`
# (`dropped/too_old` → `rl_vlm_dropped{name="too_old"}`). Prometheus sees all of them with `ray_` in front.

PREFIX = "rl_vlm_"

# First part of a metric's name -> the last parts that have a Ray metric of their own.
_OWN: Mapping[str, str] = {
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
FAMILIES = (*_OWN, "accuracy", "env", "evaluation", "items", "mixture", "time", "dropped", "restarts", "metric")
EVAL = "eval"  # the part of what an evaluation found
_PARTS = {
    "policy": "learner", "mismatch": "learner", "value": "learner", "critic": "learner",
    "weights": "serving", "labels": "preference", "reward_model": "preference", "replay": "preference",
    "time": "train", "restarts": "train", "metric": "train", "evaluation": EVAL, "items": EVAL,
}  # fmt: skip

# What a run reports beside its metrics; alerts and `rl-vlm top` read these.
STATE: Mapping[str, str] = {
    "run_info": "1; the tags say what is trained",
    "run_active": "1 while the run goes on, 0 once it has ended",
    "iteration": "Iterations done; steps of a preference run",
    "iterations": "Iterations, or steps, of the whole run",
    "iteration_seconds": "Wall time between two rows of metrics, moving average",
    "last_progress_timestamp_seconds": "When the last iteration ended, or the run began",
    "max_policy_lag": "Bound of rollout_lag_max; 0 is synchronous",
    "reward_start": "Mean reward of the first iterations",
    "reward_smoothed": "Moving average of the reward",
    "reward_best": "Best moving average of the reward so far",
    "mismatch_growth": "mismatch_kl over its value at the start",
    "disk_free_bytes": "Free space where the run folder is",
    "disk_total_bytes": "Size of the disk where the run folder is",
    "write_errors": "Files of the run that could not be written",
}  # fmt: skip


class Series(NamedTuple):
    """A Ray metric (without `ray_`), its tag `name` (empty for a metric of its own) and its part."""

    metric: str
    name: str
    part: str


def series_of(metric: str, part: str = "") -> Series:
    """The Ray metric of a run's metric; `part` in place of the one that its name says."""
    first, _, rest = metric.partition("/")
    if rest in _OWN.get(first, "").split():
        return Series(f"{PREFIX}{first}_{rest}", "", part or _PARTS.get(first, "rollout"))
    if first not in FAMILIES or not rest:
        first, rest = "metric", metric
    return Series(PREFIX + first, rest, part or _PARTS.get(first, "rollout"))


def all_metrics() -> frozenset[str]:
    """The names of all metrics that a run may have, without `ray_`."""
    own = (f"{first}_{rest}" for first, names in _OWN.items() for rest in names.split())
    return frozenset(PREFIX + name for name in (*own, *FAMILIES, *STATE))


POLICY = "policy"  # the one policy that a run trains, as in its Serve application
MAX_SERIES = 400
_NAME_LENGTH = 80
_TAGS: tuple[str, ...] = ("run", "policy", "part")
_AGAIN_S = 1.0  # the agent forgets after two of Ray's intervals, 20 s unless they are set shorter
_JOIN_S = 5.0

logger = logging.getLogger(__name__)


class RayMetrics:
    """Sets a gauge for every metric, tagged with run, policy and part, until `close`. Ray is initialised.

    `total`: iterations of the whole run, or steps of a preference run.
    """

    def __init__(self, config: TrainConfig, folder: Path, total: int) -> None:
        self._name, self._folder = config.name, folder
        self._gauges: dict[str, Gauge] = {}
        self._series: dict[tuple[str, str], Series] = {}
        self._warned_of_too_many = False
        self._last: dict[tuple[Gauge, tuple[str, ...]], tuple[dict[str, str], float]] = {}
        self._lock, self._closing = threading.Lock(), threading.Event()
        self._trend, self._mismatch, self._seconds = RewardTrend(), MismatchGrowth(), MovingAverage()
        self._running = False
        self._row_at = time.monotonic()  # the wall clock may be set meanwhile
        info = self._gauge(f"{PREFIX}run_info", STATE["run_info"], (*_TAGS, "algorithm", "env", "model"))
        about = {"algorithm": config.algorithm.name, "env": config.env.title, "model": config.model.path}
        self._set_gauge(info, {**self._tags("train"), **about}, 1.0)
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
        """Take over the metrics of a run before it was resumed: its start stays its start."""
        for reward in rewards:
            self._trend.add(reward)
        for mismatch in mismatches:
            self._mismatch.add(mismatch)

    def add(self, iteration: int, metrics: Mapping[str, float], write_errors: int = 0) -> None:
        """Set the metrics of an iteration, and what is computed from them."""
        now = time.monotonic()
        if self._running:  # before the first row the run was starting
            self._seconds.add(now - self._row_at)
        self._row_at, self._running = now, True
        for name, value in metrics.items():
            self._set(name, "", value)
        state = {} if "reward/mean" not in metrics else self._trend.add(metrics["reward/mean"])
        growth = self._mismatch.add(metrics.get("mismatch/kl", math.nan))
        disk = shutil.disk_usage(self._folder)
        self._set_state(
            iteration=iteration,
            iteration_seconds=self._seconds.value or 0.0,
            last_progress_timestamp_seconds=time.time(),
            disk_free_bytes=disk.free,
            disk_total_bytes=disk.total,
            write_errors=write_errors,
            **state,
            **({} if growth is None else {"mismatch_growth": growth}),
        )

    def add_evaluation(self, numbers: Mapping[str, float]) -> None:
        """Set the metrics of an evaluation, with the part `eval`."""
        for name, value in numbers.items():
            self._set(name, EVAL, value)
        # An evaluation is progress, too, and counts for no iteration.
        self._row_at = time.monotonic()
        self._set_state(last_progress_timestamp_seconds=time.time())

    def close(self) -> None:
        """Say that the run has ended. The agent forgets its metrics soon afterwards."""
        self._closing.set()
        self._thread.join(_JOIN_S)
        self._set_state(run_active=0)

    def _repeat(self) -> None:
        while not self._closing.wait(_AGAIN_S):
            with self._lock:
                known = [(gauge, tags, value) for (gauge, _), (tags, value) in self._last.items()]
            for gauge, tags, value in known:
                gauge.set(value, tags)

    def _set_gauge(self, gauge: Gauge, tags: dict[str, str], value: float) -> None:
        with self._lock:
            self._last[gauge, tuple(tags.values())] = tags, value
        gauge.set(value, tags)

    def _tags(self, part: str) -> dict[str, str]:
        return {"run": self._name, "policy": POLICY, "part": part}

    def _set_state(self, **values: float) -> None:
        for name, value in values.items():
            gauge = self._gauge(PREFIX + name, STATE[name], _TAGS)
            self._set_gauge(gauge, self._tags("train"), float(value))

    def _set(self, metric: str, part: str, value: float) -> None:
        if not math.isfinite(value):
            return
        series = self._series.get((metric, part))
        if series is None:
            if len(self._series) >= MAX_SERIES:
                if not self._warned_of_too_many:
                    self._warned_of_too_many = True
                    logger.warning("More than %d metrics: %s and further ones are no Ray metrics.", MAX_SERIES, metric)
                return
            series = self._series[metric, part] = series_of(metric, part)
        tags, keys, about = self._tags(series.part), _TAGS, metric
        if series.name:
            tags["name"], keys = series.name[:_NAME_LENGTH], (*_TAGS, "name")
            about = f"{metric.partition('/')[0]}/NAME"
        self._set_gauge(self._gauge(series.metric, f"{about} of progress.csv or eval.jsonl", keys), tags, float(value))

    def _gauge(self, metric: str, description: str, keys: tuple[str, ...]) -> Gauge:
        if metric not in self._gauges:
            from ray.util.metrics import Gauge

            self._gauges[metric] = Gauge(metric, description, tag_keys=keys)
        return self._gauges[metric]
