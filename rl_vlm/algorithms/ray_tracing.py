"""Ray's own tracing beside ours: its spans of remote calls join the trace of the iteration."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ray.util.tracing import tracing_helper

from rl_vlm.tracing import traceparent


@contextmanager
def ray_spans_join() -> Iterator[None]:
    """Inside, what Ray traces of this thread belongs to the open span; does nothing unless the cluster was started with
    `ray start --tracing-startup-hook`, whose exporter gets Ray's spans."""
    parent = traceparent()
    if not parent or not tracing_helper._is_tracing_enabled():
        yield
        return
    from opentelemetry import context, propagate

    token = context.attach(propagate.extract({"traceparent": parent}))
    try:
        yield
    finally:
        context.detach(token)
