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
from typing import TYPE_CHECKING, NamedTuple

from rl_vlm.config import CommonConfig
from rl_vlm.monitoring.display import MismatchGrowth, MovingAverage, RewardTrend

if TYPE_CHECKING:
    from ray.util.metrics import Gauge  # `doctor` reads the names below without Ray

# Which Ray metric a figure of a run becomes: a bounded list of names, so that no run can flood a metrics agent.
#
# A figure with a fixed name has a metric of its own (`reward/mean` → `rl_vlm_reward_mean`). Others, whose last part an
# environment, a reason or a variant names, share the metric of their first part and differ in the tag `name`
# (`dropped/too_old` → `rl_vlm_dropped{name="too_old"}`). Prometheus sees all of them with `ray_` in front.

PREFIX = "rl_vlm_"

_FIXED: Mapping[str, Mapping[str, str]] = {
    "reward": {
        "mean": "Mean reward of the trajectories of an iteration, or true return of a preference run's episodes",
        "std": "Standard deviation of the rewards of an iteration",
        "learned": "Mean return by the learned reward",
        "zero_advantage_groups": "Share of groups whose advantages are all zero",
    },
    "policy": {
        "loss": "Policy loss",
        "kl": "KL per token to the reference policy, nats",
        "approx_kl": "KL per token to the policy before the update, nats",
        "entropy": "Entropy per token, nats",
        "token_logprob_mean": "Mean log-probability of sampled tokens",
        "clip_fraction": "Share of clipped tokens",
        "ratio_max": "Largest importance ratio",
        "grad_norm": "Gradient norm",
        "lr": "Learning rate",
        "optimizer_steps": "Optimiser steps of an iteration",
        "skipped_steps": "Optimiser steps that were skipped because the gradient was not finite",
        "first_ratio_error": "Largest |ratio - 1| before the first step; must be 0",
        "kl_coef": "Coefficient of the KL penalty",
        "alpha": "Entropy temperature of SAC",
        "alpha_loss": "Loss of the entropy temperature",
        "updates": "Updates of an iteration",
    },
    "mismatch": {
        "kl": "KL per token between engine and learner, nats",
        "token_mult_prob_error": "Mean of exp |log p(engine) - log p(learner)|; 1 is agreement",
        "masked": "Share of tokens left out because engine and learner disagree",
    },
    "value": {
        "loss": "Loss of the critic",
        "return": "Mean return",
        "explained_variance": "Share of the returns' variance that the critic explains",
    },
    "critic": {"loss": "Loss of SAC's critics", "q": "Mean Q value", "reward": "Mean reward of a batch"},
    "rollout": {
        "turns": "Mean number of turns",
        "tokens": "Sampled tokens of an iteration",
        "tokens_per_s": "Sampled tokens per second that the learner waited; with a policy lag, per second",
        "truncated": "Share of truncated trajectories",
        "groups": "Groups of an iteration",
        "lag_max": "Age of the oldest group that was learned from, in versions, as max_policy_lag bounds it",
        "oldest_token": "Where turns cross versions: age of the oldest token that was learned from, in versions",
        "utilisation": "Share of the env runners' places that were at work",
        "under_way": "Groups that are being sampled",
        "waiting": "Complete groups that wait for the learner",
        "episodes": "Episodes since the start",
        "length": "Mean length of an episode, steps",
        "success": "Share of successful episodes",
        "steps_per_s": "Environment steps per second",
    },
    "weights": {
        "version": "Newest version of the policy",
        "publish_s": "Seconds until all replicas had loaded a version",
        "acked": "Replicas that have loaded a version",
    },
    "curriculum": {
        "stage": "Stage of the curriculum, from 0",
        "stages": "Number of stages",
        "solve_rate": "Solve rate in the present stage",
        "episodes": "Episodes of the curriculum so far",
    },
    "sight": {
        "gap": "Engine to learner on the same tokens, nats",
        "kl_blank": "KL per token between answers to true and to blank images, nats",
        "accuracy_gap": "Accuracy with true images minus that with blank ones",
    },
    "judge": {
        "win_rate": "Answers that won",
        "order_bias": "Share of answers whose two orders contradict each other",
        "first_rate": "Share of replies for the text that was shown first",
        "unclear": "Share of replies that chose neither",
        "refused": "Share of answers that lost without a question",
        "requests": "Questions to the judge",
        "tokens": "Tokens of the judge",
        "seconds": "How long a group waited for the judge",
    },
    "labels": {
        "total": "Labels asked for since the start",
        "asked": "Labels of the last session",
        "usable": "Usable labels of the last session",
        "undecided": "Undecided labels of the last session",
        "errors": "Failed labels of the last session",
        "seconds": "Seconds of labelling of the last session",
        "accuracy": "Share of the decided labels that agree with the true reward",
    },
    "reward_model": {
        "accuracy": "Share of labels that the reward model agrees with",
        "loss": "Loss of the reward model",
        "examples": "Pairs that the reward model has learned from",
        "gradient_steps": "Gradient steps of the last fit",
    },
    "replay": {"rows": "Rows of the replay buffer", "mib": "Size of the replay buffer, MiB"},
}  # fmt: skip

# First part of a figure -> description of the metric that its other figures share.
FAMILIES: Mapping[str, str] = {
    **{part: f"Other figures {part}/<name>" for part in _FIXED},
    "accuracy": "Accuracy of an evaluation's variant, or of an environment of a mixture",
    "env": "Figures that environments declare",
    "evaluation": "Other figures of an evaluation",
    "items": "Items of an evaluation",
    "mixture": "Figures of a mixture's environments",
    "time": "Seconds of a part of an iteration",
    "dropped": "What was lost since the start, by reason",
    "restarts": "Restarts since the start, by part",
    "figure": "All other figures, by their whole name",
}
EVAL = "eval"  # the part of what an evaluation found
_PARTS = {
    "policy": "learner", "mismatch": "learner", "value": "learner", "critic": "learner",
    "weights": "serving", "labels": "preference", "reward_model": "preference", "replay": "preference",
    "time": "train", "restarts": "train", "figure": "train", "evaluation": EVAL, "items": EVAL,
}  # fmt: skip

# What a run says of itself beside its figures; alerts and `rl-vlm top` read these.
STATE: Mapping[str, str] = {
    "run_info": "1; the tags say what is trained",
    "run_active": "1 while the run goes on, 0 once it has ended",
    "iteration": "Iterations done; steps of a preference run",
    "iterations": "Iterations, or steps, of the whole run",
    "iteration_seconds": "Wall time between two rows of figures, moving average",
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
    """A figure's metric (without `ray_`), its tag `name` (empty for a metric of its own), its part and its description."""

    metric: str
    name: str
    part: str
    description: str


def series_of(figure: str, part: str = "") -> Series:
    """Where a figure goes; `part` in place of the one that its name says."""
    first, _, rest = figure.partition("/")
    own = _FIXED.get(first, {}).get(rest)
    if own is not None:
        return Series(f"{PREFIX}{first}_{rest}", "", part or _PARTS.get(first, "rollout"), own)
    if first not in FAMILIES or not rest:
        first, rest = "figure", figure
    return Series(PREFIX + first, rest, part or _PARTS.get(first, "rollout"), FAMILIES[first])


def all_metrics() -> frozenset[str]:
    """The names of all metrics that a run may have, without `ray_`."""
    fixed = (f"{first}_{rest}" for first, names in _FIXED.items() for rest in names)
    return frozenset(PREFIX + name for name in (*fixed, *FAMILIES, *STATE))


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
        from ray.util.metrics import Gauge

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
            from ray.util.metrics import Gauge

            keys = (*_TAGS, "name") if series.name else _TAGS
            self._gauges[series.metric] = Gauge(series.metric, series.description, tag_keys=keys)
        return self._gauges[series.metric]
