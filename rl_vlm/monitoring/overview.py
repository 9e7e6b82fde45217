"""From metrics to rows: runs, replicas and nodes, for people and for programs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from rl_vlm.monitoring.figure_names import EVAL
from rl_vlm.monitoring.samples import Sample
from rl_vlm.types import POLICY

_RUN = "ray_rl_vlm_"
_NODE = "ray_node_"
# Column of a run -> its metric, without the prefix.
_RUN_COLUMNS = {
    "iteration": "iteration", "iterations": "iterations", "iteration_seconds": "iteration_seconds",
    "reward": "reward_mean", "reward_smoothed": "reward_smoothed", "reward_best": "reward_best",
    "tokens_per_s": "rollout_tokens_per_s", "steps_per_s": "rollout_steps_per_s",
    "lag_max": "rollout_lag_max", "max_policy_lag": "max_policy_lag",
    "under_way": "rollout_under_way", "waiting": "rollout_waiting",
    "version": "weights_version", "mismatch_kl": "mismatch_kl", "mismatch_growth": "mismatch_growth",
    "labels": "labels_total", "write_errors": "write_errors",
    "disk_free_bytes": "disk_free_bytes", "disk_total_bytes": "disk_total_bytes",
}  # fmt: skip
_REPLICA_COLUMNS = {
    "version": "adapter_version", "running": "running_samples", "waiting": "waiting_samples",
    "mean_batch": "mean_batch", "requests": "requests_total", "errors": "errors_total",
}  # fmt: skip
_NODE_COLUMNS = {
    "cpu_percent": "cpu_utilization", "memory_used": "mem_used", "memory_total": "mem_total",
    "disk_percent": "disk_utilization_percentage",
}  # fmt: skip
_MIB = 2**20


class Overview(NamedTuple):
    """One row per run, replica and node; None is what no metric says."""

    runs: list[dict[str, Any]]
    replicas: list[dict[str, Any]]
    nodes: list[dict[str, Any]]


def overview(
    samples: Sequence[Sample], now: float, previous: Sequence[Sample] = (), elapsed_s: float = 0.0
) -> Overview:
    """The rows of `samples`, read at `now` (seconds since 1970); rates come from `previous`, read `elapsed_s` before."""
    return Overview(_runs(samples, now), _replicas(samples, previous, elapsed_s), _nodes(samples))


def _grouped(samples: Iterable[Sample], prefix: str, *keys: str) -> dict[tuple[str, ...], list[Sample]]:
    """Samples with the prefix by the values of these labels, where the first is not empty."""
    groups: defaultdict[tuple[str, ...], list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.name.startswith(prefix) and sample.labels.get(keys[0]):
            groups[tuple(sample.labels.get(key, "") for key in keys)].append(sample)
    return dict(sorted(groups.items()))


def _sum(samples: Iterable[Sample], name: str, **labels: str) -> float | None:
    found = [s.value for s in samples if s.name == name and all(s.labels.get(k) == v for k, v in labels.items())]
    return sum(found) if found else None


def _runs(samples: Sequence[Sample], now: float) -> list[dict[str, Any]]:
    rows = []
    # By process: after a restart the one before is seen for some seconds, and two runs may have one name.
    for (run, _), own in _grouped(samples, _RUN, "run", "WorkerId").items():
        active = _sum(own, f"{_RUN}run_active")
        if active is None:  # a replica's process
            continue
        info = next((s.labels for s in own if s.name == f"{_RUN}run_info"), {})
        progress = _sum(own, f"{_RUN}last_progress_timestamp_seconds")
        row: dict[str, Any] = {
            "run": run,
            "state": "active" if active else "ended",
            "algorithm": info.get("algorithm"),
            "env": info.get("env"),
            "idle_seconds": None if progress is None else max(now - progress, 0.0),
        }
        row |= {column: _sum(own, _RUN + metric) for column, metric in _RUN_COLUMNS.items()}
        named = [s for s in own if "name" in s.labels]
        evaluated = [s for s in named if s.labels.get("part") == EVAL]  # training has an accuracy of its samples, too
        for column, shown in (("accuracy", evaluated), ("dropped", named), ("restarts", named)):
            row[column] = {s.labels["name"]: s.value for s in shown if s.name == _RUN + column}
        rows.append(row)
    return rows


def _replicas(samples: Sequence[Sample], previous: Sequence[Sample], elapsed_s: float) -> list[dict[str, Any]]:
    before = _grouped(previous, _RUN, "replica", "run")
    rows = []
    for (replica, run), own in _grouped(samples, _RUN, "replica", "run").items():
        row: dict[str, Any] = {"run": run, "runs": _users(own) or [run], "replica": replica}
        row["node"] = own[0].labels.get("NodeAddress", "")
        row |= {column: _sum(own, _RUN + metric) for column, metric in _REPLICA_COLUMNS.items()}
        if row["version"] is None:  # its counters outlive it
            continue
        tokens, then = (_sum(found, f"{_RUN}generated_tokens_total") for found in (own, before.get((replica, run), [])))
        known = elapsed_s > 0 and tokens is not None and then is not None
        row["tokens_per_s"] = max((tokens or 0.0) - (then or 0.0), 0.0) / elapsed_s if known else None
        rows.append(row)
    return sorted(rows, key=lambda row: (row["run"], row["replica"]))


def _users(samples: Iterable[Sample]) -> list[str]:
    """The runs that use a shared replica, by the names of their policies (run-12345678); none of a replica of one run's own."""
    policies = {one.labels.get("policy", POLICY) for one in samples if one.name == f"{_RUN}policy_version"} - {POLICY}
    return sorted({policy.rpartition("-")[0] for policy in policies})


def _nodes(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    rows = []
    for (node,), own in _grouped(samples, _NODE, "ip").items():
        row: dict[str, Any] = {"node": node}
        row |= {column: _sum(own, _NODE + metric) for column, metric in _NODE_COLUMNS.items()}
        row["gpus"] = [
            {
                "gpu": gpu,
                "name": gpu_samples[0].labels.get("GpuDeviceName", ""),
                "percent": _sum(gpu_samples, f"{_NODE}gpus_utilization"),
                "memory_used": _bytes(_sum(gpu_samples, f"{_NODE}gram_used")),
                "memory_free": _bytes(_sum(gpu_samples, f"{_NODE}gram_available")),
            }
            for (gpu,), gpu_samples in _grouped(own, _NODE, "GpuIndex").items()
        ]
        rows.append(row)
    return rows


def _bytes(mebibytes: float | None) -> float | None:
    return None if mebibytes is None else mebibytes * _MIB
