"""Counts of a replica, and their way to Ray's metrics.

Requests only add to plain numbers; a task of the replica sends them to Ray every few seconds, so that no request waits for
a metrics agent. Names begin with `rl_vlm_`; every series is tagged with its run, policy, part (`serving`), Serve application and replica.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from typing import Any

from ray.util import metrics

from rl_vlm.engines.base import EngineStats
from rl_vlm.types import Completion

_SECONDS = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300]
_GAUGES = {
    "running_samples": "Samples that are being generated",
    "waiting_samples": "Samples that have not begun",
    "mean_batch": "Samples per decode step",
    "image_cache_hit_rate": "Images whose features were cached, since the start",
    "prefix_cache_hit_rate": "Prompt tokens found in the prefix cache, since the start",
    "adapter_version": "Adapter version that the replica serves",
    "adapter_swap_seconds": "From the adapter's arrival to its being served, the last time",
    "publish_seconds": "From publication to this replica's acknowledgement, the last time",
}
_HISTOGRAMS = {
    "queue_seconds": "From a request's arrival to its first forward pass, of whole answers",
    "time_to_first_token_seconds": "From a streamed request's arrival to its first token",
    "request_seconds": "From a request's arrival to its answer",
}
_COUNTERS = {
    "requests_total": "Requests answered",
    "prompt_tokens_total": "Prompt tokens, image tokens included",
    "generated_tokens_total": "Sampled tokens",
    "adapter_swaps_total": "Adapter versions loaded",
    "replica_starts_total": "Replicas started; more than one per place: they were replaced",
}
_POLICY_COUNTERS = {
    "policy_requests_total": "Requests answered, by policy",
    "policy_prompt_tokens_total": "Prompt tokens, by policy",
    "policy_generated_tokens_total": "Sampled tokens, by policy",
}
# The histograms leave out observations beyond this number between two reports; the counters hold all.
_MAX_OBSERVATIONS = 10_000


@dataclass(slots=True)
class PolicyTally:
    """Counts of one policy on one replica."""

    requests: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    version: int = 0  # the newest that has answered

    def add(self, other: PolicyTally) -> None:
        """Count what `other` has counted, too."""
        self.requests += other.requests
        self.prompt_tokens += other.prompt_tokens
        self.generated_tokens += other.generated_tokens
        self.version = max(self.version, other.version)


@dataclass(slots=True)
class ReplicaTally:
    """Counts of one replica since it started."""

    requests: int = 0
    by_policy: dict[str, PolicyTally] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)  # by kind: the error's class
    publish_s: float = 0.0
    observations: dict[str, deque[float]] = field(
        default_factory=lambda: {name: deque(maxlen=_MAX_OBSERVATIONS) for name in _HISTOGRAMS}
    )

    def answered(self, completion: Completion, seconds: float) -> None:
        """One request got its answer."""
        self.requests += 1
        self.observations["queue_seconds"].append(completion.queue_s)
        self.observations["request_seconds"].append(seconds)
        sampled = sum(len(sample.token_ids) for sample in completion.samples)
        counted = PolicyTally(1, len(completion.prompt_ids), sampled, completion.policy_version)
        self.by_policy.setdefault(completion.policy, PolicyTally()).add(counted)

    def streamed(self, policy: str, counted: PolicyTally, first_token_s: float | None, seconds: float) -> None:
        """One stream of a policy has ended well."""
        self.requests += 1
        self.by_policy.setdefault(policy, PolicyTally()).add(counted)
        self.observations["request_seconds"].append(seconds)
        if first_token_s is not None:
            self.observations["time_to_first_token_seconds"].append(first_token_s)

    def failed(self, error: BaseException) -> None:
        """One request failed."""
        self.errors[type(error).__name__] += 1

    def report(self, stats: EngineStats, version: int, state: str) -> dict[str, Any]:
        """Everything as plain values, for the registry and its readers."""
        return {
            "state": state,
            "version": version,
            "requests": self.requests,
            "policies": {name: asdict(tally) for name, tally in self.by_policy.items()},
            "errors": dict(self.errors),
            "publish_s": self.publish_s,
            "engine": asdict(stats),
        }


class RayMetrics:
    """Sends a replica's counts to `ray.util.metrics`."""

    def __init__(self, run: str, app: str, replica_id: str) -> None:
        tags = {"run": run, "policy": "policy", "part": "serving", "app": app, "replica": replica_id}

        def make(kind: Any, name: str, description: str, *more: Any, keys: tuple[str, ...] = ()) -> Any:
            metric = kind(f"rl_vlm_{name}", description, *more, tag_keys=(*tags, *keys))
            metric.set_default_tags(tags)
            return metric

        self._gauges = {name: make(metrics.Gauge, name, text) for name, text in _GAUGES.items()}
        self._counters = {name: make(metrics.Counter, name, text) for name, text in _COUNTERS.items()}
        self._histograms = {name: make(metrics.Histogram, name, text, _SECONDS) for name, text in _HISTOGRAMS.items()}
        self._errors = make(metrics.Counter, "errors_total", "Requests that failed, by kind", keys=("kind",))
        # The tag `policy` of these differs from the default tag.
        self._of_policy = {name: make(metrics.Counter, name, text) for name, text in _POLICY_COUNTERS.items()}
        self._policy_version = make(metrics.Gauge, "policy_version", "Newest version that answered")
        self._sent_of_policy: Counter[tuple[str, str]] = Counter()
        self._sent: Counter[str] = Counter()
        self._sent_errors: Counter[str] = Counter()

    def send(self, tally: ReplicaTally, stats: EngineStats, version: int) -> None:
        """Report what has changed since the last call."""
        totals = {
            "requests_total": tally.requests,
            "prompt_tokens_total": stats.prompt_tokens,
            "generated_tokens_total": stats.generated_tokens,
            "adapter_swaps_total": stats.adapter_swaps,
            "replica_starts_total": 1,
        }
        for name, total in totals.items():
            if total > self._sent[name]:
                self._counters[name].inc(total - self._sent[name])
                self._sent[name] = total
        for kind, total in tally.errors.items():
            if total > self._sent_errors[kind]:
                self._errors.inc(total - self._sent_errors[kind], tags={"kind": kind})
                self._sent_errors[kind] = total
        self._send_policies(tally)
        for name, values in tally.observations.items():
            while values:
                self._histograms[name].observe(values.popleft())
        for name, value in gauges(tally, stats, version).items():
            self._gauges[name].set(value)

    def _send_policies(self, tally: ReplicaTally) -> None:
        for gone in {policy for policy, _ in self._sent_of_policy} - tally.by_policy.keys():
            for name in _POLICY_COUNTERS:
                self._sent_of_policy.pop((gone, name), None)
        for policy, own in list(tally.by_policy.items()):
            totals = (own.requests, own.prompt_tokens, own.generated_tokens)
            for name, total in zip(_POLICY_COUNTERS, totals, strict=True):
                if total > self._sent_of_policy[policy, name]:
                    self._of_policy[name].inc(total - self._sent_of_policy[policy, name], tags={"policy": policy})
                    self._sent_of_policy[policy, name] = total
            self._policy_version.set(own.version, tags={"policy": policy})


def gauges(tally: ReplicaTally, stats: EngineStats, version: int) -> dict[str, float]:
    """The values of the moment; rates are 0 before anything was looked up."""
    images = stats.image_cache_hits + stats.image_cache_misses
    return {
        "running_samples": stats.running,
        "waiting_samples": stats.waiting,
        "mean_batch": stats.mean_batch,
        "image_cache_hit_rate": stats.image_cache_hits / max(images, 1),
        "prefix_cache_hit_rate": stats.prefix_cache_hits / max(stats.prefix_cache_queries, 1),
        "adapter_version": version,
        "adapter_swap_seconds": stats.last_swap_s,
        "publish_seconds": tally.publish_s,
    }
