"""Reads the traces that a run has written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_vlm.tracing import Span, document


@dataclass(frozen=True)
class Written:
    """A span as a trace file holds it; `parent_id` is empty at the root."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, str | int | float | bool]
    error: str

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.start_ns) / 1e9


def _values(attributes: Iterable[dict[str, Any]]) -> dict[str, Any]:
    pairs = [(one["key"], *one["value"].items()) for one in attributes]
    return {key: int(value) if kind == "intValue" else value for key, (kind, value) in pairs}


def read_document(found: dict[str, Any]) -> list[Written]:
    """The spans of one OTLP document."""
    return [
        Written(
            one["name"], _values(resource["resource"]["attributes"])["service.name"], one["traceId"], one["spanId"],
            one.get("parentSpanId", ""), int(one["startTimeUnixNano"]), int(one["endTimeUnixNano"]),
            _values(one.get("attributes", ())), one.get("status", {}).get("message", ""),
        )
        for resource in found["resourceSpans"] for scope in resource["scopeSpans"] for one in scope["spans"]
    ]  # fmt: skip


def read_trace(file: Path) -> list[Written]:
    return [one for line in file.read_text().splitlines() for one in read_document(json.loads(line))]


def as_written(spans: Sequence[Span]) -> list[Written]:
    return read_document(json.loads(json.dumps(document(spans))))
