"""Spans in the JSON form of the OpenTelemetry protocol: files that collectors and Jaeger read, and an export over HTTP."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any
from urllib.parse import unquote

from rl_vlm.envs.adapters.address import is_loopback
from rl_vlm.tracing import Span, Value

_EXPORT_TIMEOUT_S = 5.0


def document(spans: Sequence[Span], run: str) -> dict[str, Any]:
    """The spans as the JSON form of an ExportTraceServiceRequest, one resource per process."""
    ordered = sorted(spans, key=lambda one: (one.service, one.start_ns))
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes({"service.name": service, "service.namespace": "rl_vlm", "run": run})},
                "scopeSpans": [{"scope": {"name": "rl_vlm"}, "spans": [_otlp(one) for one in found]}],
            }
            for service, found in groupby(ordered, key=lambda one: one.service)
        ]
    }  # fmt: skip


def _otlp(one: Span) -> dict[str, Any]:
    found: dict[str, Any] = {
        "traceId": one.trace_id,
        "spanId": one.span_id,
        "name": one.name,
        "kind": 1,  # internal
        "startTimeUnixNano": str(one.start_ns),
        "endTimeUnixNano": str(one.end_ns),
        "attributes": _attributes(one.attributes),
    }
    if one.parent_id:
        found["parentSpanId"] = one.parent_id
    if one.error:
        found["status"] = {"code": 2, "message": one.error}
    return found


def _attributes(values: dict[str, Value]) -> list[dict[str, Any]]:
    kinds = {bool: "boolValue", int: "intValue", float: "doubleValue", str: "stringValue"}
    # 64-bit integers are strings in protobuf's JSON.
    return [
        {"key": name, "value": {kinds[type(value)]: str(value) if type(value) is int else value}}
        for name, value in values.items()
    ]


def read(found: dict[str, Any]) -> list[Span]:
    """The spans of what `document` returned."""

    def values(attributes: Iterable[dict[str, Any]]) -> dict[str, Value]:
        return {
            one["key"]: int(value) if kind == "intValue" else value
            for one in attributes
            for kind, value in one["value"].items()
        }

    return [
        Span(
            one["name"], str(values(resource["resource"]["attributes"])["service.name"]), one["traceId"], one["spanId"],
            one.get("parentSpanId", ""), int(one["startTimeUnixNano"]), int(one["endTimeUnixNano"]),
            values(one["attributes"]), one.get("status", {}).get("message", ""),
        )
        for resource in found["resourceSpans"] for scope in resource["scopeSpans"] for one in scope["spans"]
    ]  # fmt: skip


def collector() -> tuple[str, dict[str, str]] | None:
    """URL and headers of the collector that OpenTelemetry's environment variables name; None without one.

    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is taken as it is, OTEL_EXPORTER_OTLP_ENDPOINT gets `/v1/traces` (OTLP over HTTP, port 4318).
    """
    whole, base = (os.environ.get(f"OTEL_EXPORTER_OTLP_{name}") for name in ("TRACES_ENDPOINT", "ENDPOINT"))
    if not whole and not base:
        return None
    given = (os.environ.get(f"OTEL_EXPORTER_OTLP_{name}") for name in ("TRACES_HEADERS", "HEADERS"))
    pairs = (next(filter(None, given), "")).split(",")
    headers = {
        key.strip(): unquote(value.strip()) for key, sign, value in (pair.partition("=") for pair in pairs) if sign
    }
    return whole or f"{base}".rstrip("/") + "/v1/traces", headers


def export(spans: Sequence[Span], run: str) -> None:
    """Send spans to the collector, if there is one. Raises httpx.HTTPError."""
    found = collector()
    if found is not None and spans:
        import httpx

        url, headers = found
        sent = document(spans, run)
        answer = httpx.post(url, json=sent, headers=headers, timeout=_EXPORT_TIMEOUT_S, trust_env=not is_loopback(url))
        answer.raise_for_status()
