"""What stands before the model: tokens, limits, queue, deadlines, clients that go away, the end of the server."""

from __future__ import annotations

import asyncio
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from core_support import picture, run_config, text_side
from engine_support import endless
from http_support import PATIENCE_S, EngineBackend, Server, data_uri, serving, tiny_engine, wait_until
from loops import in_loop
from prometheus_client.parser import text_string_to_metric_families

from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.http import gate
from rl_vlm.http.reader import RequestReader
from rl_vlm.http.schema import GenerateRequest
from rl_vlm.http.server import bind, check_exposure
from rl_vlm.runs.serve import http_app, plan
from rl_vlm.types import GenerationRequest, Message, SamplingParams, UserInputError

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
CHAT = "/v1/chat/completions"
STREAM = {"model": "tiny", "stream": True, **HI}


@pytest.fixture
def never_ending(engine: TransformersEngine, tiny_folder: Path) -> Iterator[EngineBackend]:
    """A backend whose answers take until their last token."""
    backend = EngineBackend(engine)
    with endless(engine, text_side(tiny_folder)):
        yield backend
        wait_until(lambda: backend.running == 0 and engine.stats().running == 0)


def body_of(size: int) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "x" * size}]}).encode()


def listens(url: str) -> bool:
    """Whether new connections are taken."""
    try:
        httpx.get(f"{url}/health", timeout=PATIENCE_S)
    except httpx.TransportError:  # refused, or reset: the socket was closed before the connection was taken from it
        return False
    return True


def test_a_token_opens_everything_but_health(engine: TransformersEngine, tiny_folder: Path) -> None:
    with (
        serving(EngineBackend(engine), tiny_folder, token="s3cret") as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client,
    ):
        assert client.get("/health").status_code == 200
        for wrong in (
            {},
            {"Authorization": "Bearer nope"},
            {"Authorization": "Basic s3cret"},
            {"Authorization": b"Bearer \xe9"},
        ):
            for method, path in (("GET", "/v1/models"), ("GET", "/metrics"), ("POST", CHAT)):
                reply = client.request(method, path, headers=wrong)
                assert reply.status_code == 401 and reply.headers["www-authenticate"] == "Bearer"
            assert client.post("/generate", json=HI, headers=wrong).json()["detail"].startswith("A valid token")
        right = {"Authorization": "Bearer s3cret", "Host": "any.name"}
        assert client.get("/v1/models", headers=right).status_code == 200
        assert client.post("/generate", json=HI, headers=right).status_code == 200


@pytest.mark.parametrize("token", ["", " ", "zwei\nZeilen", "schlüssel", "s3cret ", " s3cret"])
def test_a_useless_token_is_refused(token: str) -> None:
    with pytest.raises(UserInputError, match="another token"):
        check_exposure("127.0.0.1", token)


def test_a_port_in_use_is_named() -> None:
    for host in ("a..b", "x" * 70):
        with pytest.raises(UserInputError, match="--host"):
            bind(host, 0)
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(UserInputError, match="--host"):
            bind("127.0.0.1", taken.getsockname()[1])


def test_a_large_body_is_refused_while_it_is_read(engine: TransformersEngine, tiny_folder: Path) -> None:
    with serving(EngineBackend(engine), tiny_folder, max_body_mib=0.5) as server:
        for path in ("/generate", CHAT):
            reply = httpx.post(
                server.url + path,
                content=body_of(2**20),
                headers={"Content-Type": "application/json"},
                timeout=PATIENCE_S,
            )
            assert reply.status_code == 413 and "0.5 MiB" in reply.text
        # Without an announced length the answer comes as soon as the limit is passed: this body never ends.
        address = ("127.0.0.1", int(server.url.rsplit(":", 1)[1]))
        with socket.create_connection(address, timeout=10) as sock:
            sock.sendall(
                b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            for _ in range(10):
                sock.sendall(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
            assert b" 413 " in sock.recv(1000)
        assert server.gate.in_flight == 0
        assert httpx.post(f"{server.url}/generate", json=HI, timeout=PATIENCE_S).status_code == 200


def test_a_body_that_does_not_come_is_not_waited_for(engine: TransformersEngine, tiny_folder: Path) -> None:
    with serving(EngineBackend(engine), tiny_folder, deadline_s=0.3) as server:
        with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1])), timeout=PATIENCE_S) as sock:
            sock.sendall(
                b"POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
            )
            reply = sock.recv(1000)
            while b"not all of it came within 0.3 s" not in reply:  # the body may come behind the headers
                more = sock.recv(1000)
                assert more, reply
                reply += more
            assert b" 408 " in reply
        assert server.gate.in_flight == 0


def test_a_full_queue_tells_clients_to_come_back(never_ending: EngineBackend, tiny_folder: Path) -> None:
    with serving(never_ending, tiny_folder, max_queue=2, deadline_s=PATIENCE_S) as server, ThreadPoolExecutor() as pool:
        running = [pool.submit(httpx.post, server.url + "/generate", json=HI, timeout=PATIENCE_S) for _ in range(2)]
        wait_until(lambda: server.gate.in_flight == 2)
        reply = httpx.post(f"{server.url}/generate", json=HI, timeout=PATIENCE_S)
        assert reply.status_code == 429 and int(reply.headers["retry-after"]) >= 1
        assert httpx.get(f"{server.url}/health", timeout=PATIENCE_S).json()["in_flight"] == 2
        assert [future.result().status_code for future in running] == [200, 200]


def test_a_deadline_ends_an_answer_and_frees_its_place(never_ending: EngineBackend, tiny_folder: Path) -> None:
    with serving(never_ending, tiny_folder, deadline_s=0.2) as server:
        reply = httpx.post(f"{server.url}/generate", json={**HI, "max_tokens": 900}, timeout=PATIENCE_S)
        assert reply.status_code == 504 and "0.2 s" in reply.json()["detail"]
    with serving(never_ending, tiny_folder, deadline_s=4) as server:  # time for the first token on a busy machine
        reply = httpx.post(server.url + CHAT, json={**STREAM, "max_tokens": 900, "n": 64}, timeout=PATIENCE_S)
        assert reply.status_code == 200
        last = json.loads(reply.text.strip().splitlines()[-1].removeprefix("data: "))
        assert "4 s" in last["error"]["message"]
        wait_until(lambda: never_ending.running == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_rows(
    never_ending: EngineBackend, engine: TransformersEngine, tiny_folder: Path, stream: bool
) -> None:
    with serving(never_ending, tiny_folder) as server:
        body = {"model": "tiny", **HI, "max_tokens": 900, "n": 64, "stream": stream}
        with (
            pytest.raises(httpx.ReadTimeout),
            httpx.stream("POST", server.url + CHAT, json=body, timeout=httpx.Timeout(PATIENCE_S, read=0.15)) as reply,
        ):
            lines = reply.iter_lines()  # kept: the connection is closed with its iterator
            next(lines)
            wait_until(lambda: engine.stats().running > 0)
            raise httpx.ReadTimeout("seen enough")
        wait_until(lambda: never_ending.running == 0 and engine.stats().running == 0)
        wait_until(lambda: server.gate.in_flight == 0)


def test_a_client_that_does_not_read_is_not_waited_for(
    never_ending: EngineBackend, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "SEND_GRACE_S", 0.5)
    body = json.dumps({**STREAM, "max_tokens": 900, "n": 64, "logprobs": True, "top_logprobs": 20}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with serving(never_ending, tiny_folder, deadline_s=2, max_reply_values=10**7) as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        sock.sendall(head.encode() + body)
        wait_until(lambda: server.gate.in_flight == 1)
        wait_until(lambda: server.gate.in_flight == 0, seconds=30)


def test_answers_that_nobody_takes_do_not_keep_a_connection(
    engine: TransformersEngine, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a token, and though the connection was never closed by us."""
    monkeypatch.setattr("rl_vlm.http.server._UNREAD_S", 0.5)
    with serving(EngineBackend(engine), tiny_folder, token="secret") as server, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        sock.settimeout(PATIENCE_S)
        with pytest.raises((ConnectionError, BrokenPipeError)):
            while True:  # the server's and our buffers are full at some point, and then the connection is cut
                sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)


def test_a_stopping_server_finishes_what_runs_and_takes_nothing_more(
    never_ending: EngineBackend, tiny_folder: Path
) -> None:
    server = Server(never_ending, tiny_folder, drain_s=PATIENCE_S).start()
    with ThreadPoolExecutor() as pool:
        running = [
            pool.submit(httpx.post, server.url + path, json=body, timeout=PATIENCE_S)
            for path, body in (("/generate", HI), (CHAT, {**STREAM, "max_tokens": 400}))
        ]
        wait_until(lambda: server.gate.in_flight == 2)
        server.server.should_exit = True
        wait_until(lambda: not listens(server.url))
        replies = [future.result() for future in running]
    assert [reply.status_code for reply in replies] == [200, 200]
    assert replies[1].text.endswith("data: [DONE]\n\n")
    server.stop()


def test_what_still_runs_when_the_time_to_stop_is_over_is_told(never_ending: EngineBackend, tiny_folder: Path) -> None:
    server = Server(never_ending, tiny_folder, drain_s=0.2).start()
    with ThreadPoolExecutor() as pool:
        running = pool.submit(httpx.post, server.url + "/generate", json={**HI, "max_tokens": 900}, timeout=PATIENCE_S)
        wait_until(lambda: server.gate.in_flight == 1)
        server.stop()
        assert (running.result().status_code, running.result().headers["retry-after"]) == (503, "1")


def test_metrics_count_what_happened(engine: TransformersEngine, tiny_folder: Path) -> None:
    with (
        serving(EngineBackend(engine), tiny_folder) as server,
        httpx.Client(base_url=server.url, timeout=PATIENCE_S) as client,
    ):
        usage = client.post(CHAT, json={"model": "tiny", **HI, "n": 2}).json()["usage"]
        client.post(CHAT, json={**STREAM, "max_tokens": 1})
        client.post("/generate", json={})

        def values() -> dict[tuple[str, ...], float]:
            families = text_string_to_metric_families(client.get("/metrics").text)
            return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}

        # An answer is counted when it is over, a moment after the client has it.
        wait_until(lambda: values().get(("rl_vlm_http_requests_total", "/generate", "400")) == 1)
        found = values()
    assert found["rl_vlm_http_requests_total", CHAT, "200"] == 2
    assert found["rl_vlm_http_tokens_total", "sampled"] == usage["completion_tokens"] + 1
    assert found["rl_vlm_http_tokens_total", "prompt"] == 2 * usage["prompt_tokens"]
    assert found["engine_lines",] == 1


def test_head_answers_as_get_does_without_the_body(engine: TransformersEngine, tiny_folder: Path) -> None:
    with serving(EngineBackend(engine), tiny_folder) as server:
        for path in ("/health", "/v1/models"):
            reply = httpx.head(f"{server.url}{path}", timeout=PATIENCE_S)
            assert (reply.status_code, reply.content) == (200, b"")


def test_a_wrong_path_or_method_is_an_error_as_all_others_are(engine: TransformersEngine, tiny_folder: Path) -> None:
    with serving(EngineBackend(engine), tiny_folder) as server:
        replies = [httpx.get(server.url + path, timeout=PATIENCE_S) for path in ("/v1/nothing", "/nothing", CHAT)]
        replies += [httpx.post(f"{server.url}/health", timeout=PATIENCE_S)]
        replies += [httpx.post(server.url + CHAT, json={}, headers={"content-encoding": "gzip"}, timeout=PATIENCE_S)]
    assert [reply.status_code for reply in replies] == [404, 404, 405, 405, 415]
    both = ["error", "detail"]
    assert [[*reply.json()] for reply in replies] == [["error"], both, ["error"], both, ["error"]]
    assert "POST" in replies[2].headers["allow"]


# --- `POST /generate`: a client of RL-VLM-F's fork, written from its published interface alone, gets what it expects


LEFT, RIGHT = (picture(np.random.default_rng(seed), 64, 64) for seed in (1, 2))
PAIR = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "Image 1:"},
            {"type": "image", "image": data_uri(LEFT.png)},
            {"type": "text", "text": "Image 2:"},
            {"type": "image", "image": data_uri(RIGHT.png)},
            {"type": "text", "text": "Which is closer to the goal? Answer 0, 1 or -1."},
        ],
    }
]


@pytest.fixture(scope="module")
def server(engine: TransformersEngine, tiny_folder: Path) -> Iterator[Server]:
    with serving(EngineBackend(engine), tiny_folder, max_new_tokens=600) as server:
        yield server


def post(server: Server, body: Any, path: str = "/generate") -> tuple[int, Any]:
    """Status and parsed reply, by the standard library."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_a_greedy_query_about_two_images(server: Server, engine: TransformersEngine, tiny_folder: Path) -> None:
    status, reply = post(server, {"messages": PAIR, "max_tokens": 16, "temperature": 0})
    codec = text_side(tiny_folder).codec
    parts = [part["text"] if part["type"] == "text" else image for part, image in zip(
        PAIR[0]["content"], (None, LEFT, None, RIGHT, None), strict=True)]  # fmt: skip
    span = codec.encode_prompt([Message("user", tuple(parts))])
    asked = GenerationRequest("direct", span.token_ids, SamplingParams(16, temperature=0.0), span.images)
    direct = asyncio.run(engine.generate([asked]))[0]
    assert status == 200
    assert reply == {"text": codec.decode(direct.samples[0].token_ids).strip()}


def test_defaults(tiny_folder: Path, server: Server) -> None:
    reader = RequestReader(text_side(tiny_folder), server.limits, 1024)
    read = [
        reader.generate(GenerateRequest(messages=[{"role": "user", "content": "x"}], **given), "r", -1)[
            0
        ].request.sampling
        for given in ({}, {"temperature": 0, "max_tokens": 16}, {"max_tokens": 100_000})
    ]
    assert (read[0].max_new_tokens, read[0].temperature, read[0].top_p) == (512, 0.7, 0.9)
    assert (read[1].max_new_tokens, read[1].temperature, read[1].top_p) == (16, 0.0, 1.0)
    assert read[2].max_new_tokens == 600
    assert post(server, {"messages": [{"role": "user", "content": "plain text"}], "unknown": True})[0] == 200


def test_an_engine_that_fails_is_an_error_of_the_server(tiny_folder: Path) -> None:
    with tiny_engine(tiny_folder) as engine, serving(EngineBackend(engine), tiny_folder) as server:
        asyncio.run(engine.close())
        status, reply = post(server, {"messages": PAIR})
        assert (status, reply["detail"], reply["error"]["message"]) == (500, *["The engine is closed."] * 2)
        for stream in (False, True):
            status, reply = post(server, {"model": "tiny", "messages": PAIR, "stream": stream}, CHAT)
            assert (status, reply["error"]["type"]) == (500, "server_error")


def test_every_answer_has_an_id_the_clients_own_where_it_gives_one(server: Server) -> None:
    given = httpx.get(f"{server.url}/health", headers={"x-request-id": "mine-1"}, timeout=60)
    made = [httpx.get(f"{server.url}/nowhere", timeout=60) for _ in range(2)]
    forged = httpx.get(f"{server.url}/health", headers={"x-request-id": "a b" * 99}, timeout=60)
    assert given.headers["x-request-id"] == "mine-1"
    ids = {reply.headers["x-request-id"] for reply in (*made, forged)}
    assert len(ids) == 3 and all(len(name) == 32 for name in ids)


@in_loop
async def test_pages_of_allowed_origins_may_call_with_the_token(tiny_folder: Path) -> None:
    config = run_config(tiny_folder, http__allowed_origins=["https://chat.example.org"])
    app = http_app(config, "tiny", "run", object(), None, text_side(tiny_folder), "secret")
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        for origin, allowed in (("https://chat.example.org", True), ("https://other.example.org", False)):
            asks = {
                "Origin": origin,
                "Access-Control-Request-Method": "POST",
                "Access-Control-Request-Headers": "authorization",
            }
            reply = await client.options("/v1/chat/completions", headers=asks)
            assert (reply.headers.get("access-control-allow-origin") == origin) == allowed
            assert (reply.status_code == 200) == allowed
        reply = await client.get("/version", headers={"Origin": "https://chat.example.org"})
        assert reply.status_code == 401 and reply.headers["access-control-allow-origin"]
        reply = await client.get("/version", headers={"Authorization": "Bearer secret"})
        assert reply.status_code == 200
    with pytest.raises(UserInputError, match="RL_VLM_API_TOKEN"):
        plan(str(tiny_folder), ["http.allowed_origins=['https://chat.example.org']"])
