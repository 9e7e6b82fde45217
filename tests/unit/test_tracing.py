"""Spans nest, travel between processes and are written in OpenTelemetry's form."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from recorder_support import QUIET

from rl_vlm import tracing
from rl_vlm.monitoring import otlp
from rl_vlm.monitoring.recorder import RunRecorder
from rl_vlm.serving.spans import engine_spans
from rl_vlm.tracing import Span
from rl_vlm.types import Completion, Sample, StopReason


def names(spans: list[Span]) -> dict[str, Span]:
    found = {one.name: one for one in spans}
    assert len(found) == len(spans)
    return found


def test_spans_nest_and_children_lie_inside_their_parents() -> None:
    with tracing.trace("driver", "iteration", run="r") as spans, tracing.span("sample", groups=2), tracing.span("wait"):
        pass
    found = names(spans)
    root, sample, wait = found["iteration"], found["sample"], found["wait"]
    assert (root.parent_id, sample.parent_id, wait.parent_id) == ("", root.span_id, sample.span_id)
    assert {one.trace_id for one in spans} == {root.trace_id}
    assert root.start_ns <= sample.start_ns <= wait.start_ns <= wait.end_ns <= sample.end_ns <= root.end_ns
    assert sample.attributes == {"groups": 2} and sample.service == "driver"


def test_without_a_trace_nothing_is_kept_and_nothing_is_sent() -> None:
    with tracing.span("alone"):
        assert tracing.traceparent() == ""
        assert tracing.add("past", 1, 2) == ""
        tracing.adopt([Span("x", "s", "t", "a", "", 1, 2)])
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
            sent += own

        sent: list[Span] = []
        thread = threading.Thread(target=elsewhere, args=(sent,))
        thread.start()
        thread.join(10)
        tracing.adopt(sent)
    found = names(spans)
    assert found["group"].parent_id == found["sample"].span_id
    assert found["group"].service == "env_runner-0"


def test_tasks_side_by_side_keep_their_own_spans() -> None:
    async def group(number: int) -> None:
        with tracing.span(f"group-{number}"):
            await asyncio.sleep(0)
            with tracing.span(f"request-{number}"):
                await asyncio.sleep(0)

    async def all_groups() -> list[Span]:
        with tracing.trace("driver", "iteration") as spans:
            await asyncio.gather(*(group(k) for k in range(5)))
        return spans

    found = names(asyncio.run(all_groups()))
    for k in range(5):
        assert found[f"request-{k}"].parent_id == found[f"group-{k}"].span_id
        assert found[f"group-{k}"].parent_id == found["iteration"].span_id


def test_an_error_is_noted_and_raised() -> None:
    with pytest.raises(ValueError, match="no"), tracing.trace("driver", "iteration") as spans, tracing.span("learn"):
        raise ValueError("no")
    assert [(one.name, one.error) for one in spans] == [("learn", "ValueError: no"), ("iteration", "ValueError: no")]
    with tracing.span("after"):
        assert tracing.traceparent() == ""


def test_a_request_in_its_replica() -> None:
    sample = Sample(np.arange(3, dtype=np.int32), np.zeros(3, dtype=np.float32), StopReason.LENGTH)
    completion = Completion("r", np.arange(4, dtype=np.int32), (sample, sample), 7, "abc", queue_s=0.5, generate_s=9.0)
    spans = names(list(engine_spans(f"00-{'a' * 32}-{'b' * 16}-01", completion, 10**9, 0.25, 2.0)))
    engine = spans["engine"]
    assert (engine.trace_id, engine.parent_id, engine.service) == ("a" * 32, "b" * 16, "replica-abc")
    assert engine.attributes == {"version": 7, "prompt_tokens": 4, "tokens": 6}
    # The engine counts from its own start: its seconds never reach beyond the call.
    times = {name: (one.start_ns / 1e9, one.end_ns / 1e9) for name, one in spans.items()}
    assert times == {"engine": (1, 3), "admit": (1, 1.25), "queue": (1.25, 1.75), "generate": (1.75, 3)}
    assert all(spans[part].parent_id == engine.span_id for part in ("admit", "queue", "generate"))


SPANS = [
    Span("iteration", "driver", "a" * 32, "b" * 16, "", 10**18, 10**18 + 5, {"done": 3, "lr": 0.5, "x": True, "n": "r"}),
    Span("group", "env_runner-0", "a" * 32, "c" * 16, "b" * 16, 10**18 + 1, 10**18 + 4, {}, "EnvError: broken"),
]  # fmt: skip


def test_the_protocols_form_is_what_opentelemetrys_own_schema_reads() -> None:
    from google.protobuf.json_format import ParseDict
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    written = otlp.document(SPANS, "quickstart")
    # The JSON form of the protocol has ids in hexadecimal, where protobuf's own has base64.
    for resource in written["resourceSpans"]:
        for one in resource["scopeSpans"][0]["spans"]:
            for key in ("traceId", "spanId", "parentSpanId"):
                bytes.fromhex(one.get(key, ""))
    read = ParseDict(json.loads(json.dumps(written)), ExportTraceServiceRequest())
    resources = {r.resource.attributes[0].value.string_value: r.scope_spans[0].spans[0] for r in read.resource_spans}
    assert set(resources) == {"driver", "env_runner-0"}
    assert resources["driver"].start_time_unix_nano == 10**18
    assert {a.key: a.value.WhichOneof("value") for a in resources["driver"].attributes} == {
        "done": "int_value", "lr": "double_value", "x": "bool_value", "n": "string_value",
    }  # fmt: skip
    assert resources["env_runner-0"].status.message == "EnvError: broken"
    assert otlp.read(written) == SPANS


def test_the_recorder_keeps_a_file_per_iteration_and_a_resumed_run_cuts_them(tmp_path: Path) -> None:
    recorder = RunRecorder(tmp_path, QUIET)
    recorder.log_spans(1, [])
    assert not (tmp_path / "traces").exists()
    for iteration in (2, 2, 4):
        recorder.log_spans(iteration, SPANS)
    lines = (tmp_path / "traces" / "iteration-000002.jsonl").read_text().splitlines()
    assert [otlp.read(json.loads(line)) for line in lines] == [SPANS, SPANS]
    RunRecorder(tmp_path, QUIET, resumed_iteration=3)
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["iteration-000002.jsonl"]


class Collector(BaseHTTPRequestHandler):
    received: list[tuple[str, str | None, str | None, dict]] = []  # noqa: RUF012

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.received.append((self.path, self.headers["Content-Type"], self.headers["X-Key"], body))
        self.send_response(503 if len(self.received) > 1 else 200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_a_collector_gets_them_and_its_failure_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}/")
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # not for this machine
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=Basic%20secret, other=1")
        recorder = RunRecorder(tmp_path, QUIET)
        recorder.log_spans(1, SPANS)
        assert recorder.write_errors == 0
        recorder.log_spans(2, SPANS)
        server.shutdown()
    path, kind, key, body = Collector.received[0]
    assert (path, kind, key) == ("/v1/traces", "application/json", "Basic secret")
    assert otlp.read(body) == SPANS
    assert recorder.write_errors == 1 and "collector" in caplog.text
    assert (tmp_path / "traces" / "iteration-000002.jsonl").is_file()
