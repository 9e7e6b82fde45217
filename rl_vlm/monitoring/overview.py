"""From metrics to rows: runs, replicas and nodes, for people and for programs."""

from __future__ import annotations

import contextlib
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from rl_vlm.envs.address import is_loopback
from rl_vlm.monitoring.ray_metrics import EVAL
from rl_vlm.types import POLICY, RLVLMError, UserInputError

# What `rl-vlm top` looks at; a node's agent has thousands of other series.
WANTED = ("ray_rl_vlm_", "ray_node_")
DEFAULT_DASHBOARD = "http://127.0.0.1:8265"
_TIMEOUT_S = 5.0
_READERS = 16  # nodes that are read at once


class Sample(NamedTuple):
    """One value of one series."""

    name: str
    labels: Mapping[str, str]
    value: float


class MetricsUnavailableError(UserInputError):
    """There are no metrics where the user said, or the user may not read them."""


def default_dashboard() -> str:
    """The dashboard that Ray's environment variables name, else the one of this machine."""
    named = [os.environ.get(name, "") for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")]
    return next((url for url in named if url.startswith("http")), DEFAULT_DASHBOARD)


def parse(text: str) -> list[Sample]:
    """The wanted samples of a page in Prometheus' text format; nan is left out."""
    from prometheus_client.parser import text_string_to_metric_families

    lines = "".join(line + "\n" for line in text.splitlines() if line.startswith(WANTED))
    samples = (sample for family in text_string_to_metric_families(lines) for sample in family.samples)
    return [Sample(found.name, found.labels, found.value) for found in samples if not math.isnan(found.value)]


def read_cluster(dashboard: str) -> tuple[list[Sample], list[str]]:
    """The samples of all nodes, and the endpoints that did not answer.

    Raises MetricsUnavailableError, also when none answered.
    """
    groups = _get(f"{dashboard.rstrip('/')}/api/prometheus/sd", dashboard, _token()).json()
    targets = [target for group in groups for target in group["targets"]]
    with ThreadPoolExecutor(_READERS) as threads:
        pages = list(threads.map(_page, targets))
    missing = [target for target, page in zip(targets, pages, strict=True) if page is None]
    if targets and len(missing) == len(targets):
        raise MetricsUnavailableError(
            f"The dashboard {dashboard} names {len(targets)} metrics endpoints ({targets[0]}, ...) and none answers "
            "here: run `rl-vlm top` on a machine of the cluster, or read a Prometheus with --prometheus."
        )
    return [sample for page in pages if page is not None for sample in parse(page)], missing


def read_prometheus(url: str) -> list[Sample]:
    """The present samples that a Prometheus has. Raises MetricsUnavailableError."""
    query = '{__name__=~"' + "|".join(f"{prefix}.+" for prefix in WANTED) + '"}'
    found = _get(f"{url.rstrip('/')}/api/v1/query", url, params={"query": query}).json()
    samples = []
    for series in found["data"]["result"]:
        labels = dict(series["metric"])
        value = float(series["value"][1])
        if not math.isnan(value):
            samples.append(Sample(labels.pop("__name__"), labels, value))
    return samples


def _page(target: str) -> str | None:
    import httpx

    # These ports know no token, so none is sent to them. A proxy does not reach the cluster's own network.
    with contextlib.suppress(httpx.HTTPError):
        page = httpx.get(f"http://{target}/metrics", timeout=_TIMEOUT_S, trust_env=False)
        return page.raise_for_status().text
    return None


def _get(url: str, named: str, headers: Mapping[str, str] | None = None, **query: Any) -> Any:
    import httpx

    try:
        answer = httpx.get(url, headers=headers, timeout=_TIMEOUT_S, trust_env=not is_loopback(url), **query)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise MetricsUnavailableError(
            f"Nothing answers at {named} ({error}): give the head's dashboard with --address, or a Prometheus with "
            "--prometheus. A private cluster has metrics with resources.dashboard=true and logging.ray_metrics=true."
        ) from error
    if answer.status_code in (401, 403):
        raise MetricsUnavailableError(
            f"{named} asks for the cluster's token: set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to a file that holds it."
        )
    if answer.status_code != 200 or "json" not in answer.headers.get("content-type", ""):
        raise MetricsUnavailableError(
            f"{named} answers {answer.status_code} and no metrics: is this the right address?"
        )
    return answer


def token_file() -> Path:
    """Where Ray looks for the token if no variable holds it."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()


def _token() -> dict[str, str]:
    """The header of Ray's token authentication, from the environment, a named file or Ray's own; else empty."""
    token, path = os.environ.get("RAY_AUTH_TOKEN", "").strip(), token_file()
    if not token and path.is_file():
        try:
            token = path.read_text().strip()
        except OSError as error:
            raise RLVLMError(f"Cannot read the token in {path}: {error.strerror}.") from error
    return {"Authorization": f"Bearer {token}"} if token else {}


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
    """The rows of `samples`, read at `now` (Unix time); rates come from `previous`, read `elapsed_s` before."""
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
    """The runs that use a shared replica, by the names of their policies (run-12345678)."""
    policies = {sample.labels.get("policy", POLICY) for sample in samples if sample.name == f"{_RUN}policy_version"} - {
        POLICY
    }
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
