"""Spans nest, travel between processes and are written in OpenTelemetry's form."""

from __future__ import annotations

import json
import pickle
import random
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from ports import local_server
from recorder_support import QUIET
from traces_support import Written, as_written, read_trace

from rl_vlm import tracing
from rl_vlm.monitoring.recorder import RunRecorder
from rl_vlm.tracing import Span


def names(spans: list[Span]) -> dict[str, Written]:
    found = {one.name: one for one in as_written(spans)}
    assert len(found) == len(spans)
    return found


def test_spans_nest_and_children_lie_inside_their_parents() -> None:
    with tracing.trace("driver", "iteration", run="r") as spans, tracing.span("sample", groups=2), tracing.span("wait"):
        pass
    found = names(spans)
    root, sample, wait = found["iteration"], found["sample"], found["wait"]
    assert (root.parent_id, sample.parent_id, wait.parent_id) == ("", root.span_id, sample.span_id)
    assert {one.trace_id for one in found.values()} == {root.trace_id}
    assert root.start_ns <= sample.start_ns <= wait.start_ns <= wait.end_ns <= sample.end_ns <= root.end_ns
    assert sample.attributes == {"groups": 2} and sample.service == "driver"


def test_without_a_trace_nothing_is_kept_and_nothing_is_sent() -> None:
    with tracing.span("alone"):
        assert tracing.traceparent() == ""
        tracing.adopt(example())
    with tracing.continued("", "elsewhere") as spans, tracing.span("alone"):
        pass
    assert spans == []


def test_another_process_goes_on_and_sends_its_spans_back() -> None:
    with tracing.trace("driver", "iteration") as spans, tracing.span("sample"):
        parent = tracing.traceparent()
        assert len(parent) == 55 and parent.startswith("00-")

        def elsewhere(sent: list[Span]) -> None:  # a thread has a context of its own, as a process has
            assert tracing.traceparent() == ""
            with tracing.continued(parent, "env_runner-0") as own, tracing.span("group"):
                pass
            sent += pickle.loads(pickle.dumps(own))

        sent: list[Span] = []
        thread = threading.Thread(target=elsewhere, args=(sent,))
        thread.start()
        thread.join(10)
        tracing.adopt(sent)
    found = names(spans)
    assert found["group"].parent_id == found["sample"].span_id
    assert found["group"].service == "env_runner-0"


def example() -> list[Span]:
    """Spans of two processes, one of them with an error."""
    with tracing.trace("driver", "iteration", done=3, lr=0.5, x=True, n="r") as spans:
        parent = tracing.traceparent()
        with pytest.raises(KeyError), tracing.continued(parent, "env_runner-0") as others, tracing.span("group"):
            raise KeyError("broken")
        tracing.adopt(others)
    return spans


def test_the_protocols_form_is_what_opentelemetrys_own_schema_reads() -> None:
    from google.protobuf.json_format import ParseDict
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans = example()
    written = tracing.document(spans)
    # The JSON form of the protocol has ids in hexadecimal, where protobuf's own has base64.
    for resource in written["resourceSpans"]:
        for one in resource["scopeSpans"][0]["spans"]:
            for key in ("traceId", "spanId", "parentSpanId"):
                bytes.fromhex(one.get(key, ""))
    read = ParseDict(json.loads(json.dumps(written)), ExportTraceServiceRequest())
    resources = {r.resource.attributes[0].value.string_value: r.scope_spans[0].spans[0] for r in read.resource_spans}
    assert set(resources) == {"driver", "env_runner-0"}
    assert resources["driver"].start_time_unix_nano == spans[-1].start_time
    assert {a.key: a.value.WhichOneof("value") for a in resources["driver"].attributes} == {
        "done": "int_value", "lr": "double_value", "x": "bool_value", "n": "string_value",
    }  # fmt: skip
    assert resources["env_runner-0"].status.message == "KeyError: 'broken'"
    assert as_written(pickle.loads(pickle.dumps(spans))) == as_written(spans)


def test_the_recorder_keeps_a_file_per_iteration_and_a_resumed_run_cuts_them(tmp_path: Path) -> None:
    recorder, spans = RunRecorder(tmp_path, QUIET), example()
    recorder.log_spans(1, [])
    assert not (tmp_path / "traces").exists()
    for iteration in (2, 2, 4):
        recorder.log_spans(iteration, spans)
    assert read_trace(tmp_path / "traces" / "iteration-000002.jsonl") == 2 * as_written(spans)
    RunRecorder(tmp_path, QUIET, resumed_iteration=3)
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["iteration-000002.jsonl"]


def test_a_collector_gets_the_spans_of_all_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans = pickle.loads(pickle.dumps(example()))
    received: list[tuple[str, str, bytes]] = []

    def collect(path: str, headers: Any, body: bytes) -> tuple[int, str]:
        received.append((path, headers["X-Key"], body))
        return 200, ""

    with local_server(collect) as url:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"{url}/")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=Basic%20secret, other=1")
        recorder = RunRecorder(tmp_path, QUIET)
        recorder.log_spans(1, spans)
        recorder.close()
    ((path, key, body),) = received
    assert (path, key) == ("/v1/traces", "Basic secret")
    sent = ExportTraceServiceRequest.FromString(body)
    assert {
        (span.name, span.span_id.hex()) for r in sent.resource_spans for s in r.scope_spans for span in s.spans
    } == {(one.name, one.span_id) for one in as_written(spans)}


def test_a_collector_that_does_not_answer_costs_an_iteration_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        recorder, spans = RunRecorder(tmp_path, QUIET), example()
        recorder.log_spans(1, spans)  # imports the exporter
        started = time.monotonic()
        for iteration in range(2, 12):
            recorder.log_spans(iteration, 100 * spans)
        assert time.monotonic() - started < 30  # each batch would wait for the collector's ten seconds
        recorder.close()
        assert time.monotonic() - started < 60
    assert recorder.write_errors == 0 and len(list((tmp_path / "traces").iterdir())) == 11


def test_ids_differ_between_processes_that_seed_random_equally() -> None:
    ids = set()
    for _ in range(2):
        random.seed(0)
        with tracing.trace("driver", "iteration") as spans:
            pass
        ids |= {(one.trace_id, one.span_id) for one in as_written(spans)}
    assert len(ids) == 2
