"""Random requests to a live server: by its own schema, and damaged bytes on the wire. No 5xx, and it answers the next client."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from fuzzing import SECONDS, damaged, fuzz
from http_support import PATIENCE_S, EngineBackend, Server, data_uri, serving, tiny_engine
from image_corpus import encoded
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

pytestmark = pytest.mark.timeout(max(600, 3 * SECONDS))

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Iterator[Server]:
    with (
        tiny_engine(tiny_folder) as engine,
        serving(EngineBackend(engine), tiny_folder, deadline_s=PATIENCE_S) as server,
    ):
        yield server


def test_whatever_the_schema_allows_or_not_gets_a_documented_answer(server: Server) -> None:
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")

    @document.hook
    def map_body(context: Any, body: Any) -> Any:
        """A name that is served, so that requests get further than to its look-up."""
        return {**body, "model": "tiny"} if isinstance(body, dict) and "model" in body else body

    statuses: set[int] = set()

    def check(case: schemathesis.Case) -> None:
        statuses.add(case.call_and_validate(timeout=PATIENCE_S, checks=CHECKS).status_code)

    # In documents that are wrong only the operations with a body have something that could be.
    operations = [found.ok() for found in document.get_all_operations()]
    chosen = [(operation, GenerationMode.POSITIVE) for operation in operations]
    chosen += [(operation, GenerationMode.NEGATIVE) for operation in operations if operation.method == "post"]
    shares = [5.0 if operation.method == "post" else 1.0 for operation, _ in chosen]
    for (operation, mode), share in zip(chosen, shares, strict=True):
        fuzz(operation.as_strategy(generation_mode=mode), check, 0.6 * share / sum(shares), few=20)
    assert {200, 400, 404} <= statuses <= {200, 400, 404, 405}, statuses


def _request(body: bytes, *more: str) -> bytes:
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json", *more]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def requests() -> list[bytes]:
    body = json.dumps(CHAT).encode()
    content = [{"type": "image_url", "image_url": {"url": data_uri(encoded("PNG"))}}]
    shown = json.dumps({**CHAT, "messages": [{"role": "user", "content": content}], "logprobs": True}).encode()
    streamed = json.dumps({**CHAT, "stream": True}).encode()
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    return [
        *(_request(body, f"Content-Length: {len(body)}", "Connection: close") for body in (body, shown, streamed)),
        _request(chunked, "Transfer-Encoding: chunked", "Connection: close"),
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    ]


def test_damaged_requests_on_the_wire(server: Server) -> None:
    host, port = httpx.URL(server.url).host, httpx.URL(server.url).port
    first = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, timeout=PATIENCE_S)
    assert first.status_code == 200 and port

    def check(data: bytes) -> None:
        with socket.create_connection((host, port), timeout=PATIENCE_S) as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)  # nothing more will come
            answer = b""
            try:
                while piece := sock.recv(1 << 16):
                    answer += piece
            except ConnectionResetError:
                pass
        assert not answer or answer.split(b" ", 2)[1] < b"500", (data, answer)
        assert b"Traceback" not in answer

    assert fuzz(damaged(requests()), check, 0.4) > 10
    again = httpx.post(f"{server.url}/v1/chat/completions", json=CHAT, timeout=PATIENCE_S)
    assert again.status_code == 200
