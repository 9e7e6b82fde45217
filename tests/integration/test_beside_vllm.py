"""vLLM's own server beside ours: the same requests, the same answers."""

from __future__ import annotations

import collections
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from core_support import picture, text_side
from http_support import EngineBackend, Server, data_uri, serving, tiny_engine

pytestmark = pytest.mark.acceptance
CONTEXT = 1024


@pytest.fixture(scope="module")
def ours(wide_folder: Path) -> Iterator[Server]:
    with tiny_engine(wide_folder) as engine, serving(EngineBackend(engine), wide_folder) as server:
        yield server


@pytest.fixture(scope="module")
def theirs(wide_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = (tmp_path_factory.mktemp("vllm") / "log").open("w")
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(wide_folder), "--served-model-name", "tiny",
        "--dtype", "float32", "--enforce-eager", "--max-model-len", str(CONTEXT), "--port", str(port), "--host", "127.0.0.1",
        "--logprobs-mode", "processed_logprobs", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
        "--generation-config", "vllm", "--structured-outputs-config", '{"backend": "guidance"}', "--max-num-seqs", "8",
        "--limit-mm-per-prompt", '{"image": 4, "video": 0}', "--no-enable-prefix-caching",
    ]  # fmt: skip
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)
    try:
        deadline = time.monotonic() + 240
        while True:
            assert process.poll() is None and time.monotonic() < deadline, Path(log.name).read_text()[-4000:]
            try:
                if httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200:
                    break
            except httpx.HTTPError:
                time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


WORDS = [
    "How many shapes are there?",
    "Is it red?",
    "Find x.",
    "Which corner? ünï 🐼",
    "Say <tool_call> twice.",
    "5 + 7 = ?",
]
COMPACT = {"additionalProperties": False, "x-guidance": {"whitespace_flexible": False}}  # vLLM's JSON has blanks else
TOOLS = [
    {"type": "function", "function": {"name": "zoom", "description": "Look closer.", "parameters": {
        "type": "object", "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["x"], **COMPACT}}},
    {"type": "function", "function": {"name": "stop", "parameters": {
        "type": "object", "properties": {"why": {"enum": ["red", "no"]}}, "required": ["why"], **COMPACT}}},
]  # fmt: skip
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    **COMPACT,
}


def draw(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a body of documented fields."""
    body: dict[str, Any] = {
        "model": "tiny",
        "temperature": 0,
        "max_tokens": rng.randint(1, 24),
        "return_token_ids": True,
    }
    maybe = lambda share, **fields: body.update(fields) if rng.random() < share else None  # noqa: E731
    maybe(0.2, frequency_penalty=rng.choice([-1.0, 0.5, 2]))
    maybe(0.2, presence_penalty=rng.choice([-1.0, 0.5, 2]))
    maybe(0.2, repetition_penalty=rng.choice([0.5, 1.3]))
    maybe(0.2, stop=rng.choice(["e", ["a", "the"], " "]), include_stop_str_in_output=rng.random() < 0.5)
    maybe(0.15, logit_bias={str(rng.randint(0, 400)): rng.choice([5.0, -5.0, 100.0])})
    maybe(0.15, bad_words=rng.choice([["the"], ["a", "e"], ["How"]]))
    maybe(0.2, prompt_logprobs=rng.randint(0, 3))
    maybe(0.1, top_k=rng.choice([-1, 3]), top_p=0.5, min_p=0.1, seed=5)
    maybe(0.1, user="x", skip_special_tokens=True, ignored_by_both=1)
    if rng.random() < 0.35:
        prompt: Any = rng.choice(WORDS)
        if rng.random() < 0.3:
            prompt = [rng.choice([40, 82, 220, 388, 67, 30, 276, 292, 387]) for _ in range(rng.randint(1, 30))]
        elif rng.random() < 0.3:
            prompt = [prompt, rng.choice(WORDS)]
        body["prompt"] = prompt
        maybe(0.5, logprobs=rng.randint(0, 3))
        if "prompt_logprobs" not in body:
            maybe(0.4, echo=True)
        return "completions", body
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}] if rng.random() < 0.3 else []
    for _ in range(rng.randint(1, 2)):
        parts: list[dict[str, Any]] = [{"type": "text", "text": rng.choice(WORDS)}]
        for _ in range(rng.choice([0, 0, 1, 2])):
            image = picture(np.random.default_rng(rng.randint(0, 5)), rng.choice([32, 64]), rng.choice([64, 96]))
            parts.insert(
                rng.randint(0, len(parts)),
                {"type": "image_url", "image_url": {"url": data_uri(image.png), "detail": "auto"}},
            )
        messages += [{"role": "user", "content": parts}, {"role": "assistant", "content": rng.choice(WORDS)}]
    last = rng.random()
    if last < 0.15:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    elif last < 0.3:
        call = {"id": "call00001", "type": "function", "function": {"name": "zoom", "arguments": '{"x": 5}'}}
        messages[-1] = {"role": "assistant", "content": None, "tool_calls": [call]}
        messages.append({"role": "tool", "tool_call_id": "call00001", "content": rng.choice(WORDS)})
    else:
        messages.pop()
    body["messages"] = messages
    maybe(0.5, logprobs=True, top_logprobs=rng.randint(0, 4))
    if rng.random() < 0.3:
        body |= {
            "tools": TOOLS,
            "tool_choice": rng.choice(["none", "auto", {"type": "function", "function": {"name": "zoom"}}]),
        }
        maybe(0.3, parallel_tool_calls=False)
    elif rng.random() < 0.5:
        body |= rng.choice([
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", **COMPACT}}}},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}},
            {"structured_outputs": {"regex": "[a-c]{2,5}"}}, {"structured_outputs": {"json": SCHEMA}},
            {"structured_outputs": {"grammar": 'root ::= "red" | "a" [0-9]+'}},
        ])  # fmt: skip
    else:
        maybe(0.3, min_tokens=rng.randint(0, body["max_tokens"]), ignore_eos=rng.random() < 0.5)
    return "chat/completions", body


def told(body: dict[str, Any], reply: dict[str, Any]) -> tuple[list[Any], list[float]]:
    """What the two must agree on: all but log-probabilities, and these."""
    said, values = [], []
    for choice in reply["choices"]:
        message = choice.get("message") or {"content": choice["text"]}
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()]
        logprobs = choice["logprobs"] or {}
        tokens = logprobs.get("content") or ()
        values += [one["logprob"] for token in tokens for one in (token, *token["top_logprobs"])]
        values += [value for value in logprobs.get("token_logprobs", ()) if value is not None]
        names = [token["token"] for token in tokens] or logprobs.get("tokens")
        scores = choice.get("prompt_logprobs") or reply.get("prompt_logprobs") or ()
        for place in scores if "prompt_logprobs" in body else ():
            values += [place[token]["logprob"] for token in sorted(place)] if place else []
        prompt = choice.get("prompt_token_ids") or reply.get("prompt_token_ids")
        # Tokens that are a part of a character: "\ufffd" here, there nothing until the character is whole.
        names = names and [name if name.isascii() else "" for name in names]
        content = (message["content"] or "").replace("\ufffd", "")
        said.append((content, calls, choice["finish_reason"], choice["token_ids"], names, prompt))
    said.append([reply["usage"][name] for name in ("prompt_tokens", "completion_tokens")])
    # Alternatives that cannot be sampled: none here, -9999 there.
    return said, [value for value in values if value > -1000]


def test_three_hundred_requests_get_the_same_answers(ours: Server, theirs: str, wide_folder: Path) -> None:
    rng, text = random.Random(0), text_side(wide_folder)
    known = text.codec.num_known_tokens
    never = {str(token): -100.0 for token in text.codec.suppressed_token_ids(text.vocab_size) if token < known}
    meant, differ = collections.Counter[str](), []
    for number in range(300):
        path, body = draw(rng)
        mine = httpx.post(f"{ours.url}/v1/{path}", json=body, timeout=120)
        # Special tokens are never sampled here; vLLM must be told.
        other = {**body, "logit_bias": {**never, **body.get("logit_bias", {})}}
        yours = httpx.post(f"{theirs}/v1/{path}", json=other, timeout=120)
        assert mine.status_code == 200, (body, mine.text)
        if yours.status_code != 200:
            meant[f"vLLM answers {yours.status_code}: {yours.json()['error']['message'][:60]}"] += 1
            continue
        (one, values), (two, others) = told(body, mine.json()), told(body, yours.json())
        if body.get("echo"):
            meant["echo: vLLM leaves the prompt out of the text"] += 1
            one, two = ([choice[1:] for choice in said[:-1]] for said in (one, two))
        if one != two or len(values) != len(others) or not np.allclose(values, others, atol=1e-4):
            differ.append((number, path, body, one, two, values, others))
    print(dict(meant))
    assert not differ, differ[0]
    assert meant.total() < 100
