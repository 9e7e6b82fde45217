"""Traces: what happened when in one iteration, across all processes, as OpenTelemetry spans.

`with span("environment"):` opens a child of the current span. Another process continues the trace with
`continued(traceparent)` and returns its spans with its result; the caller takes them with `adopt`. So only the driver
needs a disk or a collector. Without a trace a span costs one look at a context variable, and OpenTelemetry, whose
import takes 50 ms, is not imported.
"""

from __future__ import annotations

import copyreg
import os
import secrets
from base64 import b64decode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.trace import Tracer

Value = str | int | float | bool
Span: TypeAlias = "ReadableSpan"

_MOST_WAITING = 1 << 16  # spans that wait for the collector; an iteration can have thousands
# Of this asyncio task or thread: the tracer, and the list of finished spans.
_scope: ContextVar[tuple[Tracer, list[Span]] | None] = ContextVar("rl_vlm_trace", default=None)
_OFF = nullcontext()


@cache
def _tracer(service: str) -> Tracer:
    """The tracer of a process called `service`. Its spans go into the list in `_scope`, and can be pickled."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class Appended(SpanProcessor):
        def on_end(self, span: Span) -> None:
            if (scope := _scope.get()) is not None:
                scope[1].append(span)

    class Ids(RandomIdGenerator):  # the default's come from `random`, which a run may seed equally in all its processes
        def generate_span_id(self) -> int:
            return secrets.randbits(64) or 1

        def generate_trace_id(self) -> int:
            return secrets.randbits(128) or 1

    copyreg.pickle(ReadableSpan, _reduced)  # type: ignore[arg-type]
    resource = {"service.name": service, "service.namespace": "rl_vlm"}
    provider = TracerProvider(resource=Resource(resource), id_generator=Ids(), shutdown_on_exit=False)
    provider.add_span_processor(Appended())
    return provider.get_tracer("rl_vlm")


def _reduced(one: Span) -> tuple[Any, ...]:
    """How a span is pickled: its attributes hold locks."""
    names = ("name", "context", "parent", "status", "start_time", "end_time")
    fields = {name: getattr(one, name) for name in names} | {"attributes": dict(one.attributes or {})}
    return _restored, (dict(one.resource.attributes), fields)


def _restored(resource: dict[str, Any], fields: dict[str, Any]) -> Span:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan

    return ReadableSpan(resource=Resource(resource), **fields)


@contextmanager
def _inside(service: str, context: Context) -> Iterator[list[Span]]:
    """Inside, spans belong to this process and to the span of `context`, if it has one."""
    from opentelemetry.context import attach, detach

    spans: list[Span] = []
    current, outer = attach(context), _scope.set((_tracer(service), spans))
    try:
        yield spans
    finally:
        _scope.reset(outer)
        detach(current)


@contextmanager
def trace(service: str, name: str, **attributes: Value) -> Iterator[list[Span]]:
    """Begin a trace; yields the list of its spans, the root last. Ray's own spans become children of these."""
    from opentelemetry.context import Context

    with _inside(service, Context()) as spans, span(name, **attributes):
        yield spans


@contextmanager
def continued(parent: str, service: str) -> Iterator[list[Span]]:
    """Go on under another process's span, given its `traceparent` (empty: no trace); yields the spans to send back."""
    if not parent:
        yield []
        return
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    with _inside(service, TraceContextTextMapPropagator().extract({"traceparent": parent}, Context())) as spans:
        yield spans


def span(name: str, **attributes: Value) -> AbstractContextManager[object]:
    """A child of the span that is open in this task; does nothing where none is."""
    if (scope := _scope.get()) is None:
        return _OFF
    return scope[0].start_as_current_span(name, attributes=attributes, record_exception=False)


def finished(
    parent: str, service: str, name: str, start_ns: int, seconds: float, parts: Mapping[str, float], **attributes: Value
) -> tuple[Span, ...]:
    """The span `name` below `parent` (a `traceparent`) of known times, and its parts in seconds, one after the other,
    which end with the span at the latest: a call of several requests lasts as long as the slowest of them."""
    from opentelemetry.trace import use_span

    end_ns = start_ns + round(seconds * 1e9)
    with continued(parent, service) as spans:
        tracer = _tracer(service)
        with use_span(whole := tracer.start_span(name, start_time=start_ns, attributes=attributes)):
            for part, length in parts.items():
                stop_ns = min(start_ns + round(length * 1e9), end_ns)
                tracer.start_span(part, start_time=start_ns).end(stop_ns)
                start_ns = stop_ns
        whole.end(end_ns)
    return tuple(spans)


def traceparent() -> str:
    """The open span in the form of W3C's Trace Context, for `continued` elsewhere; empty where nothing is traced."""
    if _scope.get() is None:
        return ""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    TraceContextTextMapPropagator().inject(carrier := {"traceparent": ""})
    return carrier["traceparent"]


def adopt(spans: Iterable[Span]) -> None:
    """Take over the spans that another process has sent back; they are dropped where nothing is traced."""
    if (scope := _scope.get()) is not None:
        scope[1].extend(spans)


def collector() -> BatchSpanProcessor | None:
    """Sends spans in the background to the collector that OpenTelemetry's environment variables name, if they do."""
    if not any(os.environ.get(f"OTEL_EXPORTER_OTLP_{name}") for name in ("TRACES_ENDPOINT", "ENDPOINT")):
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    return BatchSpanProcessor(OTLPSpanExporter(), max_queue_size=_MOST_WAITING)


def document(spans: Sequence[Span]) -> dict[str, Any]:
    """The spans in the JSON form of the OpenTelemetry protocol, as collectors read it from files."""
    from google.protobuf.json_format import MessageToDict
    from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

    written: dict[str, Any] = MessageToDict(encode_spans(spans), use_integers_for_enums=True)
    for process in written["resourceSpans"]:
        for one in (span for scope in process["scopeSpans"] for span in scope["spans"]):
            # The protocol's JSON has ids in hexadecimal, where protobuf's own has base64.
            one |= {key: b64decode(one[key]).hex() for key in ("traceId", "spanId", "parentSpanId") if key in one}
    return written
