"""The published schema allows what the server takes, field by field. It knows neither limits nor fields that contradict each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_support import PATIENCE_S, EngineBackend, Server, serving, tiny_engine
from jsonschema import Draft202012Validator

HI = [{"role": "user", "content": "x"}]
# Changes of a plain request, alternately with and against the schema.
CHANGES: list[dict[str, Any]] = [
    {}, {"messages": [{"role": "assistant"}]}, {"messages": [{"role": "tool"}]}, {"messages": [{"role": "user", "content": None}]},
    {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, {"messages": [{"role": "king", "content": "x"}]},
    {"choice": [""]}, {"choice": ["a", "a"]}, {"choice": ["a"]},
    {"choice": ["a"], "guided_choice": None},
    {"structured_outputs": {"choice": ["a"], "regex": "b"}}, {"structured_outputs": {"choice": ["a"], "regex": None}},
    {"structured_outputs": {"choice": ["a"], "json": {}}}, {"structured_outputs": {"regex": "b"}},
    {"top_logprobs": 2, "logprobs": True}, {"top_logprobs": 0},
    {"stream_options": {}, "stream": True}, {"stream_options": None},
    {"tools": []}, {"tools": [{}]}, {"tools": 0}, {"tool_choice": "none"}, {"tool_choice": "auto"}, {"logit_bias": {}},
    {"logit_bias": {"1": 1}}, {"audio": {}}, {"modalities": ["text"]}, {"modalities": ["audio"]}, {"best_of": 1},
    {"best_of": 2}, {"skip_special_tokens": True}, {"skip_special_tokens": False},
    {"frequency_penalty": 2}, {"frequency_penalty": 2.1}, {"repetition_penalty": 0.001}, {"min_p": 1}, {"min_p": -0.1},
    {"ignore_eos": False, "choice": ["a"]},
    {"chat_template_kwargs": {}}, {"chat_template_kwargs": {"enable_thinking": None}}, {"chat_template_kwargs": {"x": 1}},
    {"max_tokens": 4.0}, {"max_tokens": 4.5}, {"max_tokens": "4"}, {"max_tokens": True}, {"n": 1.0}, {"temperature": 1},
    {"length_penalty": 1.0}, {"length_penalty": 2.0}, {"use_beam_search": False}, {"use_beam_search": True},
    {"stop_token_ids": []}, {"stop_token_ids": [5]}, {"bad_words": []}, {"bad_words": ["a"]}, {"echo": False}, {"echo": True},
    {"request_id": "mine"}, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "data:"}]}]},
    {"response_format": {"type": "text"}}, {"response_format": {"type": "json_object"}}, {"unknown": 1}, {"user": [1]},
]  # fmt: skip


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Iterator[Server]:
    with tiny_engine(tiny_folder) as engine, serving(EngineBackend(engine), tiny_folder) as server:
        yield server


@pytest.fixture(scope="module")
def schema(server: Server) -> Draft202012Validator:
    document = httpx.get(f"{server.url}/openapi.json", timeout=PATIENCE_S).json()
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    return Draft202012Validator({**body, "components": document["components"]})


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_schema_and_server_agree(server: Server, schema: Draft202012Validator, changes: dict[str, Any]) -> None:
    body = {"model": "tiny", "messages": HI, "max_tokens": 4, **changes}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    assert schema.is_valid(body) == (reply.status_code == 200), reply.text


def test_what_means_nothing_to_vllm_means_nothing_here(server: Server) -> None:
    """Every field of vLLM's own request with its default, as clients send it that fill in all fields."""
    protocol = pytest.importorskip("vllm.entrypoints.openai.chat_completion.protocol")
    own = protocol.ChatCompletionRequest(messages=HI).model_dump(mode="json")
    reply = httpx.post(
        f"{server.url}/v1/chat/completions", json={**own, "model": "tiny", "max_tokens": 4}, timeout=PATIENCE_S
    )
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"stream_options": True, "stream": True}, "stream_options"),
        ({"response_format": "json_object"}, "response_format"),
        ({"structured_outputs": "a|b"}, "structured_outputs"),
        ({"structured_outputs": {"regex": "[0-9]"}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs.json"),
        ({"structured_outputs": {}}, "structured_outputs.choice"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "data:"}]}]},
            "messages.0.content.0.image_url",
        ),
    ],
    ids=str,
)
def test_an_error_names_the_field(server: Server, changes: dict[str, Any], param: str) -> None:
    body = {"model": "tiny", "messages": HI, "max_tokens": 4, **changes}
    error = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S).json()["error"]
    assert (error["param"], error["message"].startswith(param)) == (param, True), error
