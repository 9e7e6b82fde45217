"""Who is not let in, and that nothing is read or kept for them: tokens, hosts, kinds of bodies, silent connections."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from http_attacks import CHAT, chat_body, head
from http_support import PATIENCE_S, EngineBackend, Server, serving, wait_until

from rl_vlm.config import HTTPSection
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.http.server import connection_limits, peer_of, to_close

TOKEN = "s3cret"
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def guarded(engine: TransformersEngine, tiny_folder: Path) -> Iterator[Server]:
    with serving(EngineBackend(engine), tiny_folder, token=TOKEN, max_queue=4) as server:
        yield server


@pytest.fixture(scope="module")
def unguarded(engine: TransformersEngine, tiny_folder: Path) -> Iterator[Server]:
    with serving(EngineBackend(engine), tiny_folder) as server:
        yield server


def connect(server: Server, data: bytes = b"") -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=20)
    sock.sendall(data)
    return sock


def answers(server: Server) -> bool:
    headers = {"Authorization": f"Bearer {TOKEN}"}
    return httpx.post(f"{server.url}/generate", json=HI, headers=headers, timeout=60).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/generate", CHAT, "/nowhere", "/health/", "//health"])
def test_without_the_token_a_post_takes_no_place_and_its_body_is_not_read(guarded: Server, path: str) -> None:
    socks = [connect(guarded, head(path, 10) + b"{") for _ in range(8)]  # the queue has four places
    try:
        for sock in socks:
            assert sock.recv(1000).startswith(b"HTTP/1.1 401 ")  # although the body never comes
        assert guarded.gate.in_flight == 0
        assert answers(guarded)
    finally:
        for sock in socks:
            sock.close()


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_only_a_get_of_health_needs_no_token(guarded: Server, method: str) -> None:
    assert httpx.request(method, f"{guarded.url}/health", timeout=PATIENCE_S).status_code == 401
    assert httpx.get(f"{guarded.url}/health", timeout=PATIENCE_S).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["[::1].evil.com", "[::1]evil.com:80", "[::1", "x@localhost", "localhost@evil.com", "localhost:80:80", "[evil.com]", "localhost evil",
     "localhost/evil", "localhost:x"],
)  # fmt: skip
def test_what_only_looks_like_this_machine_is_not_answered(unguarded: Server, host: str) -> None:
    with connect(unguarded, f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()) as sock:
        assert sock.recv(100).split()[1] in (b"403", b"400")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]", "[::1]:80"])
def test_this_machine_is_answered(unguarded: Server, host: str) -> None:
    assert httpx.get(f"{unguarded.url}/health", headers={"Host": host}, timeout=PATIENCE_S).status_code == 200


@pytest.mark.parametrize(
    "kind",
    [None, "text/plain", "application/x-www-form-urlencoded", "text/plain; application/json", "application/jsonx"],
)
@pytest.mark.parametrize("path", ["/generate", CHAT])
def test_a_body_that_a_web_page_may_send_unasked_is_refused(unguarded: Server, path: str, kind: str | None) -> None:
    headers = {"Content-Type": kind} if kind else {}
    reply = httpx.post(unguarded.url + path, content=chat_body(max_tokens=1), headers=headers, timeout=60)
    assert reply.status_code == 400 and "Content-Type: application/json" in reply.text
    right = {"Content-Type": "Application/JSON; charset=utf-8"}
    assert httpx.post(unguarded.url + path, content=chat_body(max_tokens=1), headers=right, timeout=60).is_success


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nX: y"], ids=["silent", "half of the headers"])
def test_headers_that_do_not_come_are_not_waited_for(
    engine: TransformersEngine, tiny_folder: Path, sent: bytes
) -> None:
    with serving(EngineBackend(engine), tiny_folder, headers_s=0.2) as server, connect(server, sent) as sock:
        answer = sock.recv(1000)
        assert answer.startswith(b"HTTP/1.1 408 ") if sent else answer == b""


def test_headers_that_come_a_byte_at_a_time_are_not_waited_for(engine: TransformersEngine, tiny_folder: Path) -> None:
    with serving(EngineBackend(engine), tiny_folder, headers_s=0.3) as server, connect(server) as sock:
        sock.settimeout(0.02)
        ends = time.monotonic() + 20
        while time.monotonic() < ends:
            try:
                sock.send(b"G")
                if not sock.recv(100):
                    return
            except TimeoutError:
                continue
            except OSError:
                return
        pytest.fail("the connection is still open")


def test_silent_connections_make_room_for_requests(engine: TransformersEngine, tiny_folder: Path) -> None:
    with serving(EngineBackend(engine), tiny_folder, token=TOKEN, max_connections=20, headers_s=600) as server:
        silent = [connect(server) for _ in range(100)]
        try:
            assert answers(server)
            wait_until(lambda: len(server.server.server_state.connections) <= 20)
            silent[0].settimeout(20)
            assert silent[0].recv(10) == b""  # the oldest is gone
        finally:
            for sock in silent:
                sock.close()


@pytest.mark.parametrize(("given", "per_peer"), [(None, 48), (60, 60), (64, 64), (1000, 64)])
def test_one_peer_may_have_all_connections_where_it_is_a_proxy(given: int | None, per_peer: int) -> None:
    section = HTTPSection(max_connections=64, max_connections_per_peer=given)
    assert connection_limits(section) == (64, per_peer)


# Four connections at most, three of one peer: letters are peers, numbers since when they wait, * those that do not.
@pytest.mark.parametrize(
    ("others", "new", "closed"),
    [
        ("", "a", None),
        ("a0 a1", "a", None),
        ("a1 a0 a2", "a", "a0"),  # its own, although there is room
        ("a0 a1 a2", "b", None),
        ("a2 a1 a3 b4", "c", "a1"),
        ("a0 a1 a2 b0", "a", "a0"),
        ("a0* a1* a2*", "a", "a"),
        ("a0* a1* a2*", "b", None),
        ("a0* a1* a2* b3", "c", "b3"),
        ("a0* a1* a2* b3*", "c", "c"),
    ],
)
def test_who_must_go_for_a_new_connection(others: str, new: str, closed: str | None) -> None:
    def connection(name: str) -> Any:
        return SimpleNamespace(name=name, peer=name[0], since=int(name[1:2] or 9), waiting=not name.endswith("*"))

    found = to_close(connection(new), [connection(name) for name in others.split()], total=4, per_peer=3)
    assert getattr(found, "name", None) == closed


def test_a_machine_has_one_ipv6_network_to_connect_from() -> None:
    assert peer_of("2001:db8::1") == peer_of("2001:db8::ffff:2") != peer_of("2001:db8:0:1::1")
    assert peer_of("::ffff:10.0.0.1") == peer_of("10.0.0.1") == "10.0.0.1"
    assert peer_of("fe80::1%eth0") == "fe80::/64" and peer_of("") == ""


def test_a_request_in_pieces_is_answered(guarded: Server) -> None:
    body = json.dumps(HI).encode()
    request = head("/generate", len(body), TOKEN, Connection="close") + body
    with connect(guarded) as sock:
        for k in range(0, len(request), 7):
            sock.sendall(request[k : k + 7])
        assert sock.recv(1000).startswith(b"HTTP/1.1 200 ")


def test_a_body_that_is_no_http_leaves_no_traceback(guarded: Server, caplog: pytest.LogCaptureFixture) -> None:
    lines = [f"POST {CHAT} HTTP/1.1", "Host: localhost", "Content-Type: application/json", "Transfer-Encoding: chunked"]
    for token in ([], [f"Authorization: Bearer {TOKEN}"]):
        with connect(guarded, "\r\n".join([*lines, *token, "", "no chunk\r\n"]).encode()) as sock:
            answer = b""
            while piece := sock.recv(1 << 16):
                answer += piece
        assert answer.startswith(b"HTTP/1.1 400 ") and answer.count(b"HTTP/1.1") == 1
    assert answers(guarded)
    assert not [record for record in caplog.records if record.exc_info or record.levelname == "ERROR"]
