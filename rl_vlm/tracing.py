"""Traces: what happened when in one iteration, across all processes, as OpenTelemetry spans.

A span is opened with `with span("environment"):` and belongs to the span around it in the same asyncio task. Another process goes
on under the caller's span with `continued(traceparent)` and sends its spans back with its result, where `adopt` takes them: so
nothing but the driver needs a disk or a collector, and nodes need no common file system. Without a trace a span costs one look at a
context variable, and nothing is sent.

`monitoring/otlp.py` writes them in the OpenTelemetry protocol's JSON form.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

Value = str | int | float | bool


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work. Ids are hexadecimal, of 32 digits for the trace and 16 for a span; `parent_id` is empty at the root.

    Times are nanoseconds since 1970 by the clock of the machine that did the work; `service` names the process.
    """

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Value] = field(default_factory=dict)
    error: str = ""  # the exception that ended it

    @property
    def seconds(self) -> float:
        """How long it took."""
        return (self.end_ns - self.start_ns) / 1e9


@dataclass(frozen=True, slots=True)
class _Scope:
    """The open span of an asyncio task, and where its finished children go.

    `epoch_ns`: nanoseconds from 1970 to the zero of `perf_counter_ns`, looked up once, so that all spans here are measured by one
    clock that is never set.
    """

    service: str
    trace_id: str
    span_id: str
    spans: list[Span]
    epoch_ns: int


_scope: ContextVar[_Scope | None] = ContextVar("rl_vlm_trace", default=None)
_OFF = nullcontext()


class _Open:
    """A span that is open inside its `with` block."""

    __slots__ = ("_attributes", "_name", "_outer", "_own", "_start_ns", "_token")

    def __init__(self, outer: _Scope, name: str, attributes: dict[str, Value]) -> None:
        self._outer, self._name, self._attributes = outer, name, attributes
        self._own = replace(outer, span_id=secrets.token_hex(8))

    def __enter__(self) -> None:
        self._token = _scope.set(self._own)
        self._start_ns = time.perf_counter_ns()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        _scope.reset(self._token)
        end_ns = time.perf_counter_ns()
        outer, failure = self._outer, "" if kind is None else f"{kind.__name__}: {error}"
        outer.spans.append(
            Span(
                self._name, outer.service, outer.trace_id, self._own.span_id, outer.span_id,
                outer.epoch_ns + self._start_ns, outer.epoch_ns + end_ns, self._attributes, failure,
            )
        )  # fmt: skip


def span(name: str, **attributes: Value) -> AbstractContextManager[None]:
    """A child of the span that is open in this task; does nothing where none is."""
    scope = _scope.get()
    return _OFF if scope is None else _Open(scope, name, attributes)


def add(name: str, start_ns: int, end_ns: int, **attributes: Value) -> str:
    """A finished child of the open span whose times are known from elsewhere; returns its `traceparent`."""
    scope = _scope.get()
    if scope is None:
        return ""
    span_id = secrets.token_hex(8)
    scope.spans.append(Span(name, scope.service, scope.trace_id, span_id, scope.span_id, start_ns, end_ns, attributes))
    return _traceparent(scope.trace_id, span_id)


@contextmanager
def trace(service: str, name: str, **attributes: Value) -> Iterator[list[Span]]:
    """Begin a trace; yields the list that its spans are appended to, the root last."""
    scope = _Scope(service, secrets.token_hex(16), "", [], _epoch_ns())
    with _inside(scope), span(name, **attributes):
        yield scope.spans


@contextmanager
def continued(parent: str, service: str) -> Iterator[list[Span]]:
    """Go on under another process's span, given its `traceparent`; yields the list of spans to be sent back.

    With an empty `parent` nothing inside is traced.
    """
    if not parent:
        yield []
        return
    _, trace_id, span_id, _ = parent.split("-")
    scope = _Scope(service, trace_id, span_id, [], _epoch_ns())
    with _inside(scope):
        yield scope.spans


def _epoch_ns() -> int:
    # The reading that took least: between the others the process may have been held up.
    readings = [(time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()) for _ in range(3)]
    before, now, after = min(readings, key=lambda reading: reading[2] - reading[0])
    return now - (before + after) // 2


@contextmanager
def _inside(scope: _Scope) -> Iterator[None]:
    token = _scope.set(scope)
    try:
        yield
    finally:
        _scope.reset(token)


def traceparent() -> str:
    """The open span in the form of W3C's Trace Context, for `continued` elsewhere; empty where nothing is traced."""
    scope = _scope.get()
    return "" if scope is None else _traceparent(scope.trace_id, scope.span_id)


def _traceparent(trace_id: str, span_id: str) -> str:
    return f"00-{trace_id}-{span_id}-01"


def adopt(spans: Iterable[Span]) -> None:
    """Take over the spans that another process has sent back; they are dropped where nothing is traced."""
    scope = _scope.get()
    if scope is not None:
        scope.spans.extend(spans)
