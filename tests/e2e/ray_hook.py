"""What a user gives to `ray start --tracing-startup-hook`: OpenTelemetry's set-up, here with a file per process."""

from __future__ import annotations

import os

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor


def setup_tracing() -> None:
    """Write the spans of this process to $RAY_HOOK_FOLDER/PID.jsonl."""
    out = open(f"{os.environ['RAY_HOOK_FOLDER']}/{os.getpid()}.jsonl", "w", buffering=1)  # noqa: SIM115 (for the life of the process)
    provider = TracerProvider()
    provider.add_span_processor(
        SimpleSpanProcessor(ConsoleSpanExporter(out=out, formatter=lambda span: span.to_json(indent=None) + "\n"))
    )
    trace.set_tracer_provider(provider)
