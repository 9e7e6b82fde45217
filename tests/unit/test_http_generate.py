"""`POST /generate`: a client of RL-VLM-F's fork, written from its published interface alone, gets what it expects."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_support import picture, text_side
from http_support import EngineBackend, Server, data_uri, serving, tiny_engine
from PIL import Image

from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.http.reader import RequestReader
from rl_vlm.http.schema import GenerateRequest
from rl_vlm.types import GenerationRequest, Message, SamplingParams

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
def engine(tiny_folder: Path) -> Iterator[TransformersEngine]:
    with tiny_engine(tiny_folder) as engine:
        yield engine


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
        reader.generate(GenerateRequest(messages=[{"role": "user", "content": "x"}], **given), "r", -1)[0].sampling
        for given in ({}, {"temperature": 0, "max_tokens": 16}, {"max_tokens": 100_000})
    ]
    assert (read[0].max_new_tokens, read[0].temperature, read[0].top_p) == (512, 0.7, 0.9)
    assert (read[1].max_new_tokens, read[1].temperature, read[1].top_p) == (16, 0.0, 1.0)
    assert read[2].max_new_tokens == 600
    assert post(server, {"messages": [{"role": "user", "content": "plain text"}], "unknown": True})[0] == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        {"messages": []},
        {"messages": "hello"},
        {"messages": PAIR, "max_tokens": 0},
        {"messages": PAIR, "max_tokens": "many"},
        {"messages": PAIR, "temperature": -1},
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "file:///etc/passwd"}]}]},
        {"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "too late"}]},
    ],
    ids=lambda body: str(body)[:60],
)
def test_bad_input_is_a_400_with_a_detail(server: Server, body: Any) -> None:
    status, reply = post(server, body)
    assert status == 400
    assert list(reply) == ["detail"]
    assert isinstance(reply["detail"], str) and reply["detail"].endswith(".") and "Traceback" not in reply["detail"]


def test_a_failing_engine_is_a_500_with_a_detail(tiny_folder: Path) -> None:
    with tiny_engine(tiny_folder) as engine, serving(EngineBackend(engine), tiny_folder) as server:
        asyncio.run(engine.close())
        assert post(server, {"messages": PAIR}) == (500, {"detail": "The engine is closed."})


def test_formats_give_the_same_answer(server: Server) -> None:
    gray = Image.new("RGB", (64, 64), (120, 120, 120))
    answers = set()
    for kind, options in (("png", {}), ("webp", {"lossless": True}), ("gif", {})):
        content = [
            {"type": "image", "image": data_uri(gray, kind, **options)},
            {"type": "text", "text": "Which colour?"},
        ]
        answers.add(str(post(server, {"messages": [{"role": "user", "content": content}], "temperature": 0})))
    assert len(answers) == 1 and "text" in answers.pop()
