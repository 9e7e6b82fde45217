"""What the published schema allows is what the server takes, field by field; limits of the server are left out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_support import PATIENCE_S, EngineBackend, Server, serving, tiny_engine
from jsonschema import Draft202012Validator

HI = [{"role": "user", "content": "x"}]
# Two that schemathesis found: the schema allowed them, and the server refused them.
FOUND = [
    ("/generate", {"messages": [{"role": "tool"}], "max_tokens": 1, "temperature": 2.0}),
    (
        "/v1/chat/completions",
        {
            "audio": None, "choice": [""], "frequency_penalty": None, "guided_choice": [""], "messages": [{"role": "tool"}],
            "model": "tiny", "n": 1, "seed": 0, "stop": "0", "temperature": 0.0, "top_k": 0, "top_logprobs": 0,
            "top_p": 5e-324, "verbosity": {},
        },
    ),
]  # fmt: skip
# Changes of a plain request, alternately with and against the schema.
CHANGES: list[dict[str, Any]] = [
    {}, {"messages": [{"role": "assistant"}]}, {"messages": [{"role": "user", "content": None}]},
    {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, {"messages": [{"role": "king", "content": "x"}]},
    {"choice": [""]}, {"choice": ["a", "a"]}, {"choice": ["a"]}, {"choice": ["a"], "guided_choice": ["a"]},
    {"choice": ["a"], "guided_choice": None}, {"structured_outputs": {"choice": ["a"]}, "choice": ["b"]},
    {"structured_outputs": {"choice": ["a"], "regex": "b"}}, {"structured_outputs": {"choice": ["a"], "regex": None}},
    {"structured_outputs": {"choice": ["a"], "json": {}}}, {"structured_outputs": {"regex": "b"}},
    {"top_logprobs": 2}, {"top_logprobs": 2, "logprobs": True}, {"top_logprobs": 0}, {"top_logprobs": 2, "logprobs": None},
    {"stream_options": {}}, {"stream_options": {}, "stream": True}, {"stream_options": None},
    {"tools": []}, {"tools": [{}]}, {"tools": 0}, {"tool_choice": "none"}, {"tool_choice": "auto"}, {"logit_bias": {}},
    {"logit_bias": {"1": 1}}, {"audio": {}}, {"modalities": ["text"]}, {"modalities": ["audio"]}, {"best_of": 1},
    {"best_of": True}, {"best_of": 2}, {"skip_special_tokens": True}, {"skip_special_tokens": False}, {"echo": 0},
    {"frequency_penalty": 2}, {"frequency_penalty": 2.1}, {"repetition_penalty": 0.001}, {"min_p": 1}, {"min_p": -0.1},
    {"ignore_eos": True, "choice": ["a"]}, {"ignore_eos": False, "choice": ["a"]}, {"min_tokens": 1, "choice": ["a"]},
    {"chat_template_kwargs": {}}, {"chat_template_kwargs": {"enable_thinking": None}}, {"chat_template_kwargs": {"x": 1}},
    {"response_format": {"type": "text"}}, {"response_format": {"type": "json_object"}}, {"unknown": 1}, {"user": [1]},
]  # fmt: skip


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Iterator[Server]:
    with tiny_engine(tiny_folder) as engine, serving(EngineBackend(engine), tiny_folder) as server:
        yield server


@pytest.fixture(scope="module")
def schemas(server: Server) -> dict[str, Draft202012Validator]:
    """By path: what its body may be."""
    document = httpx.get(f"{server.url}/openapi.json", timeout=PATIENCE_S).json()
    bodies = {}
    for path in ("/generate", "/v1/chat/completions"):
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        bodies[path] = Draft202012Validator({**body, "components": document["components"]})
    return bodies


@pytest.mark.parametrize(("path", "body"), FOUND, ids=[path for path, _ in FOUND])
def test_what_schemathesis_found_is_refused_by_both(
    server: Server, schemas: dict[str, Draft202012Validator], path: str, body: dict[str, Any]
) -> None:
    assert httpx.post(server.url + path, json=body, timeout=PATIENCE_S).status_code == 400
    assert not schemas[path].is_valid(body)


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_schema_and_server_agree(
    server: Server, schemas: dict[str, Draft202012Validator], changes: dict[str, Any]
) -> None:
    body = {"model": "tiny", "messages": HI, "max_tokens": 4, **changes}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    assert schemas["/v1/chat/completions"].is_valid(body) == (reply.status_code == 200), reply.text
