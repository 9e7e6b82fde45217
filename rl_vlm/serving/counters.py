"""Counts of a replica. Requests only add to plain numbers; a task of the replica sends them to Ray's metrics every few
seconds, so that no request waits for a metrics agent."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from typing import Any

from ray.util import metrics

from rl_vlm.engines.base import EngineStats
from rl_vlm.serving.ray_metrics import RayMetrics

_MAX_OBSERVATIONS = 10_000  # of a histogram between two reports; the counters hold all
_BUCKETS = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300]
HISTOGRAMS = {
    "queue_seconds": "From a request's arrival to its first forward pass, of whole answers",
    "time_to_first_token_seconds": "From a streamed request's arrival to its first token",
    "request_seconds": "From a request's arrival to its answer",
}
GAUGES = {  # rates are 0 before anything was looked up
    "running_samples": "Samples that are being generated",
    "waiting_samples": "Samples that have not begun",
    "mean_batch": "Samples per decode step",
    "image_cache_hit_rate": "Images whose features were cached, since the start",
    "prefix_cache_hit_rate": "Prompt tokens found in the prefix cache, since the start",
    "adapter_swap_seconds": "From the adapter's arrival to its being served, the last time",
    "publish_seconds": "From publication to this replica's acknowledgement, the last time",
    "adapter_version": "Adapter version that the replica serves",
    "policy_version": "Newest version that answered, by policy",
}
COUNTERS = {
    "requests_total": "Requests answered",
    "prompt_tokens_total": "Prompt tokens, image tokens included",
    "generated_tokens_total": "Sampled tokens",
    "adapter_swaps_total": "Adapter versions loaded",
    "replica_starts_total": "Replicas started; more than one per place: they were replaced",
    "errors_total": "Requests that failed, by kind",
    "policy_requests_total": "Requests answered, by policy",
    "policy_prompt_tokens_total": "Prompt tokens, by policy",
    "policy_generated_tokens_total": "Sampled tokens, by policy",
}


@dataclass(slots=True)
class ReplicaTally:
    """Counts of one replica since it started."""

    # By counter, and by the policy or the kind (the error's class) that some are counted for.
    counts: Counter[tuple[str, str]] = field(default_factory=lambda: Counter({("replica_starts_total", ""): 1}))
    newest: Counter[str] = field(default_factory=Counter)  # version that has answered, by policy
    publish_s: float = 0.0
    _sent: Counter[tuple[str, str]] = field(default_factory=Counter)
    observations: dict[str, deque[float]] = field(
        default_factory=lambda: {name: deque(maxlen=_MAX_OBSERVATIONS) for name in HISTOGRAMS}
    )

    def answered(self, policy: str, prompt_tokens: int, sampled: int, version: int, **seconds: float | None) -> None:
        """One request got its answer; `seconds` are observations of the histograms."""
        self.counts["requests_total", ""] += 1
        self.counts["policy_requests_total", policy] += 1
        self.counts["policy_prompt_tokens_total", policy] += prompt_tokens
        self.counts["policy_generated_tokens_total", policy] += sampled
        self.newest[policy] = max(self.newest[policy], version)
        for name, value in seconds.items():
            if value is not None:
                self.observations[name].append(value)

    def forget(self, policy: str) -> None:
        """Drop the counts of a policy that is gone."""
        del self.newest[policy]
        for name in [name for name in COUNTERS if name.startswith("policy_")]:
            del self.counts[name, policy]

    def report(self, stats: EngineStats, version: int, state: str) -> dict[str, Any]:
        """What readers of the registry see, as plain values."""
        errors = {kind: count for (name, kind), count in self.counts.items() if name == "errors_total"}
        return {
            "state": state,
            "version": version,
            "errors": errors,
            "publish_s": self.publish_s,
            "engine": asdict(stats),
        }

    def send(self, ray: RayMetrics, stats: EngineStats, version: int) -> None:
        """Report to Ray what has changed since the last call."""
        looked_up = stats.image_cache_hits + stats.image_cache_misses
        gauges = {
            "running_samples": stats.running,
            "waiting_samples": stats.waiting,
            "mean_batch": stats.mean_batch,
            "image_cache_hit_rate": stats.image_cache_hits / max(looked_up, 1),
            "prefix_cache_hit_rate": stats.prefix_cache_hits / max(stats.prefix_cache_queries, 1),
            "adapter_swap_seconds": stats.last_swap_s,
            "publish_seconds": self.publish_s,
            "adapter_version": version,
        }
        for name, value in gauges.items():
            ray.metric(metrics.Gauge, name, GAUGES[name]).set(value)
        for policy, newest in self.newest.items():
            ray.metric(metrics.Gauge, "policy_version", GAUGES["policy_version"]).set(newest, {"policy": policy})
        counts = self.counts.copy()
        for name in ("prompt_tokens", "generated_tokens", "adapter_swaps"):
            counts[f"{name}_total", ""] = getattr(stats, name)
        for (name, of), total in counts.items():
            if (more := total - self._sent[name, of]) > 0:
                key = "kind" if name == "errors_total" else "policy"  # a policy's counts replace the tag `policy`
                keys = ("kind",) if key == "kind" else ()
                counter = ray.metric(metrics.Counter, name, COUNTERS[name], keys=keys)
                counter.inc(more, {key: of} if of else None)
        self._sent = counts
        for name, values in self.observations.items():
            histogram = ray.metric(metrics.Histogram, name, HISTOGRAMS[name], _BUCKETS)
            while values:
                histogram.observe(values.popleft())
