"""Metrics of the HTTP server, in Prometheus' text format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from rl_vlm.types import Completion

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class HTTPMetrics:
    """Counters of one server, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.requests = Counter("rl_vlm_http_requests", "Answers.", ["route", "status"], registry=registry)
        self.seconds = Histogram(
            "rl_vlm_http_request_seconds",
            "From the first byte to the last.",
            ["route"],
            registry=registry,
            buckets=_SECONDS,
        )
        self.first_token = Histogram(
            "rl_vlm_http_first_token_seconds", "Of streams.", registry=registry, buckets=_SECONDS
        )
        self.queue = Histogram(
            "rl_vlm_http_queue_seconds", "In the engine's queue, of whole answers.", registry=registry, buckets=_SECONDS
        )
        self.tokens = Counter("rl_vlm_http_tokens", "Prompt and sampled tokens.", ["kind"], registry=registry)
        self.in_flight = Gauge("rl_vlm_http_in_flight", "Requests that are waiting or running.", registry=registry)
        self.version = Gauge("rl_vlm_http_policy_version", "The version that answered last.", registry=registry)
        self.stream_errors = Counter(
            "rl_vlm_http_stream_errors", "Streams that ended with an error event.", registry=registry
        )

    def answered(self, num_prompt_tokens: int, num_sampled: int, version: int) -> None:
        """Count one answer of the model."""
        self.tokens.labels("prompt").inc(num_prompt_tokens)
        self.tokens.labels("sampled").inc(num_sampled)
        self.version.set(version)

    def completed(self, completion: Completion) -> None:
        """Count one whole answer."""
        self.queue.observe(completion.queue_s)
        sampled = sum(len(sample.token_ids) for sample in completion.samples)
        self.answered(len(completion.prompt_ids), sampled, completion.policy_version)

    def text(self) -> str:
        """All metrics."""
        return generate_latest(self._registry).decode()
