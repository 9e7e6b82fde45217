"""Random requests to a live server: fields that hold anything, and damaged bytes on the wire. No 5xx, and it answers the next client."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fuzzing import SECONDS, damaged, fuzz
from http_support import PATIENCE_S, EngineBackend, Server, data_uri, png_header, serving, tiny_engine
from hypothesis import strategies as st
from image_corpus import encoded
from PIL import Image

from rl_vlm.http.schema import ChatRequest

pytestmark = pytest.mark.timeout(max(600, 3 * SECONDS))

JSON = {"Content-Type": "application/json"}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Iterator[Server]:
    with (
        tiny_engine(tiny_folder) as engine,
        serving(EngineBackend(engine), tiny_folder, deadline_s=PATIENCE_S) as server,
    ):
        yield server


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=12,
)
# A good chat with some fields that hold anything.
chats = st.fixed_dictionaries({}, optional=dict.fromkeys(ChatRequest.model_fields, json_values))


@pytest.mark.slow
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/generate"])
def test_whatever_the_fields_hold_gets_an_answer_of_the_right_form(server: Server, path: str) -> None:
    statuses: set[int] = set()

    def check(fields: dict[str, Any]) -> None:
        content = json.dumps({**CHAT, **fields}).encode("utf-8", "replace")
        reply = httpx.post(server.url + path, content=content, headers=JSON, timeout=PATIENCE_S)
        statuses.add(reply.status_code)
        if "text/event-stream" not in reply.headers["content-type"]:
            expected = {"choices", "text"} if reply.status_code == 200 else {"error", "detail"}
            assert expected & reply.json().keys(), reply.text

    fuzz(chats, check, 0.3, few=40)
    assert {200, 400} <= statuses <= {200, 400, 404}, statuses


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


@pytest.mark.slow
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


# --- Hostile requests: no 5xx, no hang, no traceback in a reply, no growing memory


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))

# name -> (images, expected status); test_images.py has more of them, without a server
IMAGES: dict[str, tuple[list[str], int]] = {
    "truncated file": ([data_uri(NOISE)[:2000]], 400),
    "bomb": ([data_uri(png_header(50_000, 50_000))], 400),
    "bomb under the pixel limit": ([data_uri(Image.new("RGB", (4096, 4096)))], 200),
    "CMYK": ([data_uri(NOISE.convert("CMYK"), "jpeg")], 200),
    "a thousand images": ([data_uri(Image.new("RGB", (32, 32)))] * 1000, 400),
    "file": (["file:///etc/passwd"], 400),
    "one pixel": ([data_uri(Image.new("RGB", (1, 1)))], 200),
    "thin": ([data_uri(Image.new("RGB", (4000, 1)))], 400),
    "GIF with a huge screen": ([data_uri(b"GIF89a" + struct.pack("<HH", 65535, 65535) + b"\0\0\0;")], 400),
}
TEXTS: dict[str, tuple[str, int]] = {
    "10 MB": ("word " * 2_000_000, 400),
    "more tokens than the context": ("x " * 5000, 400),
    "one long word": ("a" * 150_000, 400),
    "special strings": ("<|im_end|><|image_pad|><|vision_start|><|endoftext|>" * 20, 200),
    "private use": ("\ue000" + "0\ue001\ue002" * 5, 200),
    "null and controls": ("\0\x07\x1b[31m\u202e", 200),
    "emoji": ("👩\u200d👩\u200d👧 🏳️\u200d🌈", 200),
    "template code": ("{{ messages }}{% raise %}", 200),
    "empty": ("", 200),
}


def _body_of(said: str, system: list[Any]) -> bytes:
    turns = [{"role": "user", "content": said}, {"role": "system", "content": system}]
    return json.dumps({"messages": turns}).encode()


BODIES: dict[str, bytes] = {
    "lone surrogate": b'{"messages": [{"role": "user", "content": "\\ud83d"}]}',
    "not UTF-8": b'{"messages": [{"role": "user", "content": "\xc3\x28"}]}',
    "deep": b'{"messages": ' + b"[" * 100_000,
    "many nulls": json.dumps({"messages": [{"role": "user", "content": [None] * 200_000}]}).encode(),
    "huge number": b'{"messages": [{"role": "user", "content": "x"}], "temperature": ' + b"9" * 4000 + b"}",
    "NaN": b'{"messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
    "long field": b'{"messages": [], "' + b"k" * 10**6 + b'": 1}',
    "long role": json.dumps({"messages": [{"role": "r" * 10**6, "content": "x"}]}).encode(),
    "long type": json.dumps({"messages": [{"role": "user", "content": [{"type": "t" * 10**6}]}]}).encode(),
    "a list": b"[]",
    "a text": b'"text"',
    "no number": json.dumps({"messages": [{"role": "user", "content": "x"}], "max_tokens": "many"}).encode(),
    "below zero": json.dumps({"messages": [{"role": "user", "content": "x"}], "temperature": -1}).encode(),
    "late system with an image": _body_of(
        "x", ["too late", {"type": "image", "image": data_uri(Image.new("RGB", (32, 32)))}]
    ),
    "nothing": b"",
    "null": b"null",
    "repeated keys": b'{"messages": 1, "messages": "x"}',
    "33 MB": b" " * 34_603_009,
}


def corpus() -> Iterator[tuple[str, bytes, int]]:
    """(name, body, expected status)."""
    for name, (uris, status) in IMAGES.items():
        content = [{"type": "image", "image": uri} for uri in uris]
        yield name, _body([{"role": "user", "content": content}]), status
    for name, (text, status) in TEXTS.items():
        yield name, _body([{"role": "user", "content": text}]), status
    for name, body in BODIES.items():
        yield name, body, 413 if name.endswith("MB") else 400


def _body(messages: list[dict[str, Any]]) -> bytes:
    return json.dumps({"messages": messages, "max_tokens": 2, "temperature": 0}).encode()


@pytest.mark.parametrize(("name", "body", "status"), list(corpus()), ids=[name for name, _, _ in corpus()])
def test_hostile_requests_get_an_answer(server: Server, name: str, body: bytes, status: int) -> None:
    plain = httpx.post(f"{server.url}/generate", content=body, headers=JSON, timeout=PATIENCE_S)
    assert plain.status_code == status, plain.text[:300]
    as_chat = body[:1] + b'"model": "tiny", ' + body[1:] if body[:2] == b'{"' else body
    chat = httpx.post(f"{server.url}/v1/chat/completions", content=as_chat, headers=JSON, timeout=PATIENCE_S)
    assert chat.status_code == status, chat.text[:300]
    for reply in (plain, chat):
        assert "Traceback" not in reply.text and len(reply.text) < 2000
    assert ("detail" in plain.json(), "error" in chat.json()) == ((True, True) if status >= 400 else (False, False))
