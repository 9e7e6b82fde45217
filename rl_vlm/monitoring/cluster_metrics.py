"""The metrics of a cluster as rows of runs, replicas and nodes, read where its dashboard says."""

from __future__ import annotations

import contextlib
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_vlm.envs.address import is_loopback
from rl_vlm.types import POLICY, RLVLMError, UserInputError

if TYPE_CHECKING:
    from prometheus_client.samples import Sample  # `doctor`, which reads `token_file`, must run where packages lack

_RUN, _NODE = "ray_rl_vlm_", "ray_node_"  # what is looked at; a node's agent has thousands of other series
_TIMEOUT_S = 5.0
_READERS = 16  # nodes that are read at once
_MIB = 2**20
# Column -> its metric, without the prefix.
_RUN_COLUMNS = {
    "iteration": "iteration", "iterations": "iterations", "iteration_seconds": "iteration_seconds",
    "reward": "reward_mean", "reward_smoothed": "reward_smoothed", "reward_best": "reward_best",
    "tokens_per_s": "rollout_tokens_per_s", "steps_per_s": "rollout_steps_per_s",
    "lag_max": "rollout_lag_max", "max_policy_lag": "max_policy_lag",
    "under_way": "rollout_under_way", "waiting": "rollout_waiting",
    "version": "weights_version", "mismatch_kl": "mismatch_kl", "mismatch_growth": "mismatch_growth",
}  # fmt: skip
_REPLICA_COLUMNS = {
    "version": "adapter_version", "running": "running_samples", "waiting": "waiting_samples",
    "mean_batch": "mean_batch", "requests": "requests_total", "errors": "errors_total",
}  # fmt: skip
_NODE_COLUMNS = {
    "cpu_percent": "cpu_utilization", "memory_used": "mem_used", "memory_total": "mem_total",
    "disk_percent": "disk_utilization_percentage",
}  # fmt: skip
_GPU_COLUMNS = {"percent": "gpus_utilization", "memory_used": "gram_used", "memory_free": "gram_available"}


def default_dashboard() -> str:
    named = (os.environ.get(name, "") for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"))
    return next((url for url in named if url.startswith("http")), "http://127.0.0.1:8265")


def read_cluster(dashboard: str) -> tuple[list[Sample], list[str]]:
    """The samples of all nodes, and the endpoints that did not answer. Raises UserInputError."""
    import httpx

    url = f"{dashboard.rstrip('/')}/api/prometheus/sd"
    try:
        answer = httpx.get(url, headers=_token(), timeout=_TIMEOUT_S, trust_env=not is_loopback(url))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise UserInputError(
            f"Nothing answers at {dashboard} ({error}): give the head's dashboard with --address. A private cluster "
            "has metrics with resources.dashboard=true and logging.ray_metrics=true."
        ) from error
    if answer.status_code in (401, 403):
        raise UserInputError(f"{dashboard} asks for the cluster's token: set RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH.")
    if answer.status_code != 200 or "json" not in answer.headers.get("content-type", ""):
        raise UserInputError(f"{dashboard} answers {answer.status_code} and no metrics: is this the right address?")
    targets = [target for group in answer.json() for target in group["targets"]]
    with ThreadPoolExecutor(_READERS) as threads:
        pages = dict(zip(targets, threads.map(_page, targets), strict=True))
    missing = [target for target, page in pages.items() if page is None]
    if targets and len(missing) == len(targets):
        raise UserInputError(
            f"The dashboard {dashboard} names {len(targets)} metrics endpoints ({targets[0]}, ...) and none answers "
            "here: run `rl-vlm top` on a machine of the cluster."
        )
    return [sample for page in pages.values() for sample in page or ()], missing


def _page(target: str) -> list[Sample] | None:
    import httpx

    # These ports know no token, so none is sent to them. A proxy does not reach the cluster's own network.
    with contextlib.suppress(httpx.HTTPError):
        return parse(httpx.get(f"http://{target}/metrics", timeout=_TIMEOUT_S, trust_env=False).raise_for_status().text)
    return None


def parse(text: str) -> list[Sample]:
    """The wanted samples of a page in Prometheus' text format; nan is left out."""
    from prometheus_client.parser import text_string_to_metric_families

    lines = "".join(line + "\n" for line in text.splitlines() if line.startswith((_RUN, _NODE)))
    families = text_string_to_metric_families(lines)
    return [sample for family in families for sample in family.samples if not math.isnan(sample.value)]


def token_file() -> Path:
    """Where Ray looks for the token if no variable holds it."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()


def _token() -> dict[str, str]:
    """The header of Ray's token authentication."""
    token, path = os.environ.get("RAY_AUTH_TOKEN", "").strip(), token_file()
    try:
        token = token or (path.read_text().strip() if path.is_file() else "")
    except OSError as error:
        raise RLVLMError(f"Cannot read the token in {path}: {error.strerror}.") from error
    return {"Authorization": f"Bearer {token}"} if token else {}


def overview(samples: Sequence[Sample], now: float) -> dict[str, list[Any]]:
    """A row per run, replica and node; None is what no metric says. `now` is Unix time."""
    return {"runs": _runs(samples, now), "replicas": _replicas(samples), "nodes": _nodes(samples)}


def _grouped(samples: Iterable[Sample], prefix: str, *keys: str) -> dict[tuple[str, ...], list[Sample]]:
    """Samples with the prefix by the values of these labels, where the first is not empty."""
    groups: defaultdict[tuple[str, ...], list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.name.startswith(prefix) and sample.labels.get(keys[0]):
            groups[tuple(sample.labels.get(key, "") for key in keys)].append(sample)
    return dict(sorted(groups.items()))


def _sums(samples: Iterable[Sample], prefix: str, columns: Mapping[str, str]) -> dict[str, float | None]:
    found: dict[str, float] = {}
    for sample in samples:
        found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return {column: found.get(prefix + metric) for column, metric in columns.items()}


def _runs(samples: Sequence[Sample], now: float) -> list[dict[str, Any]]:
    rows = []
    # By process: after a restart the one before is seen for some seconds, and two runs may have one name.
    for (run, _), own in _grouped(samples, _RUN, "run", "WorkerId").items():
        state = _sums(own, _RUN, {"active": "run_active", "progress": "last_progress_timestamp_seconds"})
        if state["active"] is None:  # a replica's process
            continue
        info = next((s.labels for s in own if s.name == f"{_RUN}run_info"), {})
        row: dict[str, Any] = {
            "run": run,
            "state": "active" if state["active"] else "ended",
            "algorithm": info.get("algorithm", ""),
            "env": info.get("env", ""),
            "idle_seconds": None if state["progress"] is None else max(now - state["progress"], 0.0),
            **_sums(own, _RUN, _RUN_COLUMNS),
        }
        named = [s for s in own if "name" in s.labels]
        evaluated = [s for s in named if s.labels.get("part") == "eval"]  # training has an accuracy of its samples, too
        for column, shown in (("accuracy", evaluated), ("dropped", named), ("restarts", named)):
            row[column] = {s.labels["name"]: s.value for s in shown if s.name == _RUN + column}
        rows.append(row)
    return rows


def _replicas(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    rows = []
    for (run, replica), own in _grouped(samples, _RUN, "run", "replica").items():
        values = _sums(own, _RUN, _REPLICA_COLUMNS)
        if not replica or values["version"] is None:  # its counters outlive it
            continue
        # The runs that use a shared replica, by the names of their policies (run-12345678).
        policies = {sample.labels.get("policy", POLICY) for sample in own if sample.name == f"{_RUN}policy_version"}
        users = sorted({policy.rpartition("-")[0] for policy in policies - {POLICY}})
        node = own[0].labels.get("NodeAddress", "")
        rows.append({"run": run, "runs": users or [run], "replica": replica, "node": node, **values})
    return rows


def _nodes(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    rows = []
    for (node,), own in _grouped(samples, _NODE, "ip").items():
        gpus = []
        for (gpu,), of_gpu in _grouped(own, _NODE, "GpuIndex").items():
            used = _sums(of_gpu, _NODE, _GPU_COLUMNS)
            in_bytes = {key: value and value * _MIB for key, value in used.items() if key != "percent"}
            gpus.append({"gpu": gpu, "name": of_gpu[0].labels.get("GpuDeviceName", ""), **used, **in_bytes})
        rows.append({"node": node, **_sums(own, _NODE, _NODE_COLUMNS), "gpus": gpus})
    return rows
