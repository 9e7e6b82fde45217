"""Writes grafana_dashboard.json: `python cluster/monitoring/dashboard.py`. Every query in it is run by a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_RUN = '{run=~"$run"}'
_WIDTH, _HEIGHT, _PER_ROW = 8, 8, 3

Query = tuple[str, str]  # PromQL, legend
Panel = tuple[str, str, list[Query]]  # title, unit, queries


def figure(name: str, legend: str = "{{run}}", **labels: str) -> Query:
    """A figure of the chosen runs."""
    chosen = ",".join(['run=~"$run"', *(f'{key}="{value}"' for key, value in labels.items())])
    return f"ray_rl_vlm_{name}{{{chosen}}}", legend


def rate(counter: str, legend: str = "{{run}}") -> Query:
    """A counter of the replicas, per second, summed over them."""
    return f"sum by (run) (rate(ray_rl_vlm_{counter}{_RUN}[$__rate_interval]))", legend


def quantile(share: float, histogram: str) -> Query:
    """A quantile of what the replicas have measured."""
    buckets = f"sum by (run, le) (rate(ray_rl_vlm_{histogram}_bucket{_RUN}[$__rate_interval]))"
    return f"histogram_quantile({share}, {buckets})", f"{{{{run}}}} p{round(100 * share)}"


ROWS: dict[str, list[Panel]] = {
    "Runs": [
        ("Iterations done", "percentunit", [("ray_rl_vlm_iteration" + _RUN + " / ray_rl_vlm_iterations" + _RUN, "{{run}}")]),  # noqa: E501
        ("Time since the last row of figures", "s", [("time() - ray_rl_vlm_last_progress_timestamp_seconds" + _RUN, "{{run}}")]),  # noqa: E501
        ("Time from row to row", "s", [figure("iteration_seconds")]),
        ("Seconds of an iteration's parts", "s", [figure("time", "{{run}} {{name}}")]),
        ("Lost so far, by reason", "short", [figure("dropped", "{{run}} {{name}}")]),
        ("Restarts so far, by part", "short", [figure("restarts", "{{run}} {{name}}")]),
    ],
    "Learning": [
        ("Reward", "short", [figure("reward_mean"), figure("reward_smoothed", "{{run}} smoothed"), figure("reward_best", "{{run}} best")]),  # noqa: E501
        ("Held-out accuracy", "percentunit", [figure("accuracy", "{{run}} {{name}}", part="eval")]),
        ("Groups without a gradient", "percentunit", [figure("reward_zero_advantage_groups")]),
        ("Entropy, nats per token", "short", [figure("policy_entropy")]),
        ("KL, nats per token", "short", [figure("policy_approx_kl", "{{run}} to the policy before"), figure("policy_kl", "{{run}} to the reference")]),  # noqa: E501
        ("Engine against learner", "short", [figure("mismatch_kl"), figure("mismatch_growth", "{{run}} times the start"), figure("mismatch_masked", "{{run}} masked")]),  # noqa: E501
    ],
    "Rollout": [
        ("Sampled tokens per second", "short", [figure("rollout_tokens_per_s")]),
        ("Turns, and share cut off", "short", [figure("rollout_turns", "{{run}} turns"), figure("rollout_truncated", "{{run}} truncated")]),  # noqa: E501
        ("Age of the oldest group and its bound, versions", "short", [figure("rollout_lag_max"), figure("max_policy_lag", "{{run}} bound")]),  # noqa: E501
        ("Groups being sampled and waiting", "short", [figure("rollout_under_way", "{{run}} being sampled"), figure("rollout_waiting", "{{run}} waiting")]),  # noqa: E501
        ("Use of the env runners' places", "percentunit", [figure("rollout_utilisation")]),
        ("Does it see? Gain over blank images", "percentunit", [figure("sight_accuracy_gap")]),
    ],
    "Serving": [
        ("Samples in the engines", "short", [figure("running_samples", "{{run}} {{replica}} running"), figure("waiting_samples", "{{run}} {{replica}} waiting")]),  # noqa: E501
        ("Tokens per second", "short", [rate("generated_tokens_total", "{{run}} sampled"), rate("prompt_tokens_total", "{{run}} prompts")]),  # noqa: E501
        ("Requests per second", "reqps", [rate("requests_total"), (f"sum by (run) (rate(ray_rl_vlm_errors_total{_RUN}[$__rate_interval])) or 0 * sum by (run) (ray_rl_vlm_requests_total{_RUN})", "{{run}} failed")]),  # noqa: E501
        ("Time of a request", "s", [quantile(0.5, "request_seconds"), quantile(0.95, "request_seconds"), quantile(0.95, "queue_seconds")]),  # noqa: E501
        ("Adapter version", "short", [figure("adapter_version", "{{run}} {{replica}}"), figure("weights_version", "{{run}} published")]),  # noqa: E501
        ("Publication and swap", "s", [figure("weights_publish_s", "{{run}} until all have it"), figure("adapter_swap_seconds", "{{run}} {{replica}} swap")]),  # noqa: E501
        ("Cache hits", "percentunit", [figure("image_cache_hit_rate", "{{run}} {{replica}} images"), figure("prefix_cache_hit_rate", "{{run}} {{replica}} prefixes")]),  # noqa: E501
        ("Samples per decode step", "short", [figure("mean_batch", "{{run}} {{replica}}")]),
        ("Replicas, and starts of replicas", "short", [("rl_vlm:replicas" + _RUN, "{{run}} replicas"), ("rl_vlm:replica_starts" + _RUN, "{{run}} starts")]),  # noqa: E501
    ],
    "Learner": [
        ("Loss", "short", [figure("policy_loss")]),
        ("Gradient norm", "short", [figure("policy_grad_norm")]),
        ("Learning rate", "short", [figure("policy_lr")]),
        ("Clipped tokens", "percentunit", [figure("policy_clip_fraction")]),
        ("Largest ratio", "short", [figure("policy_ratio_max")]),
        ("Optimiser steps, and skipped", "short", [figure("policy_optimizer_steps", "{{run}} taken"), figure("policy_skipped_steps", "{{run}} skipped")]),  # noqa: E501
    ],
    "Preference": [
        ("Labels so far", "short", [figure("labels_total")]),
        ("Labels of a session", "short", [figure("labels_usable", "{{run}} usable"), figure("labels_undecided", "{{run}} undecided"), figure("labels_errors", "{{run}} failed")]),  # noqa: E501
        ("Agreement", "percentunit", [figure("labels_accuracy", "{{run}} labels and true reward"), figure("reward_model_accuracy", "{{run}} reward model and labels")]),  # noqa: E501
        ("Return by the learned reward", "short", [figure("reward_learned")]),
        ("SAC", "short", [figure("critic_q", "{{run}} Q"), figure("critic_loss", "{{run}} critic loss"), figure("policy_alpha", "{{run}} alpha")]),  # noqa: E501
        ("Environment steps per second", "short", [figure("rollout_steps_per_s")]),
        ("Replay buffer, rows", "short", [figure("replay_rows")]),
        ("Success in training", "percentunit", [figure("rollout_success")]),
        ("Reward model's loss", "short", [figure("reward_model_loss")]),
    ],
    "Nodes": [
        ("CPU", "percent", [("ray_node_cpu_utilization", "{{ip}}")]),
        ("Memory", "percentunit", [("ray_node_mem_used / ray_node_mem_total", "{{ip}}")]),
        ("Disk", "percent", [("ray_node_disk_utilization_percentage", "{{ip}}"), ("100 - 100 * ray_rl_vlm_disk_free_bytes" + _RUN + " / ray_rl_vlm_disk_total_bytes" + _RUN, "{{run}} run folder")]),  # noqa: E501
        ("GPU use", "percent", [("ray_node_gpus_utilization", "{{ip}} {{GpuIndex}}")]),
        ("GPU memory", "percentunit", [("ray_node_gram_used / (ray_node_gram_used + ray_node_gram_available)", "{{ip}} {{GpuIndex}}")]),  # noqa: E501
        ("Network", "Bps", [("ray_node_network_receive_speed", "{{ip}} in"), ("ray_node_network_send_speed", "{{ip}} out")]),  # noqa: E501
    ],
}  # fmt: skip


def dashboard() -> dict[str, Any]:
    """The dashboard, in the JSON model of Grafana 9 and later."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row, found in ROWS.items():
        panels.append({"type": "row", "title": row, "collapsed": False, "panels": [], "gridPos": _place(24, 1, 0, y)})
        y += 1
        for place, (title, unit, queries) in enumerate(found):
            x, line = place % _PER_ROW, place // _PER_ROW
            panels.append(_panel(title, unit, queries, _place(_WIDTH, _HEIGHT, x * _WIDTH, y + line * _HEIGHT)))
        y += -(-len(found) // _PER_ROW) * _HEIGHT
    for number, panel in enumerate(panels, 1):
        panel["id"] = number
    run = {
        "name": "run", "label": "Run", "type": "query", "datasource": _SOURCE, "refresh": 2, "multi": True,
        "includeAll": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"},
        "query": {"query": "label_values(ray_rl_vlm_run_active, run)", "refId": "run"},
    }  # fmt: skip
    source = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return {
        "uid": "rl-vlm", "title": "rl_vlm", "tags": ["rl_vlm", "ray"], "schemaVersion": 39, "editable": True, "refresh": "10s",  # noqa: E501
        "time": {"from": "now-1h", "to": "now"}, "templating": {"list": [source, run]},
        "annotations": {"list": [_alerts()]}, "panels": panels,
    }  # fmt: skip


def _place(width: int, height: int, x: int, y: int) -> dict[str, int]:
    return {"w": width, "h": height, "x": x, "y": y}


def _panel(title: str, unit: str, queries: list[Query], place: dict[str, int]) -> dict[str, Any]:
    return {
        "type": "timeseries",
        "title": title,
        "datasource": _SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": unit, "custom": {"lineWidth": 1, "fillOpacity": 5}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + k), "expr": query, "legendFormat": legend, "datasource": _SOURCE}
            for k, (query, legend) in enumerate(queries)
        ],
    }


def _alerts() -> dict[str, Any]:
    return {
        "name": "Alerts", "datasource": _SOURCE, "enable": True, "iconColor": "red",
        "expr": 'ALERTS{alertname=~"RLVLM.*", alertstate="firing"}', "titleFormat": "{{alertname}}", "textFormat": "{{run}}",  # noqa: E501
    }  # fmt: skip


def text() -> str:
    """The file's content."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    (HERE / "grafana_dashboard.json").write_text(text())
