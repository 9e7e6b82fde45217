"""Endpoints over HTTP: what is sent, what is read, and what is an error."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import re
import time
from typing import Any

import httpx
import numpy as np
import pytest
from label_support import pair, random_pairs
from PIL import Image

from rl_vlm.asking import choice_probabilities
from rl_vlm.asking.http import HTTPEndpoint, server_url
from rl_vlm.config import LabelsSection
from rl_vlm.config.labels import EndpointSection
from rl_vlm.labelling.labeller import VLMLabeller
from rl_vlm.labelling.labels import Label
from rl_vlm.labelling.prompts import task_prompts
from rl_vlm.types import UserInputError

PROMPTS = task_prompts("cartpole")
ONE = LabelsSection(steps=1, both_orders=False)
PLAIN = LabelsSection(steps=1, both_orders=False, guided=False)


class Server:
    """Keeps what it was sent and gives its replies in turn."""

    def __init__(self, *replies: Any) -> None:
        self.replies = list(replies)
        self.requests: list[dict[str, Any]] = []
        self.received: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.received.append(request)
        self.requests.append(json.loads(request.content or "{}"))
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        status, content, *headers = reply if isinstance(reply, tuple) else (200, reply)
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        return httpx.Response(status, content=data, headers=dict(*headers))


def completion(text: str, top: dict[str, float] | None = None, finish: str = "stop") -> dict[str, Any]:
    entries = [{"token": token, "logprob": math.log(share)} for token, share in (top or {}).items()]
    logprobs = {"content": [{"token": text, "logprob": 0.0, "top_logprobs": entries}]} if top else None
    return {
        "choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": finish, "logprobs": logprobs}],
        "usage": {"prompt_tokens": 11, "completion_tokens": 2},
    }


def endpoint(server: Server, **more: Any) -> HTTPEndpoint:
    section = EndpointSection(**{"url": "http://vlm/v1/", "model": "qwen", **more})
    return HTTPEndpoint(section, transport=httpx.MockTransport(server))


def asked(endpoint: Any, options: LabelsSection = ONE) -> tuple[Label, VLMLabeller]:
    labeller = VLMLabeller(endpoint, PROMPTS, options)
    (label,) = asyncio.run(labeller.label([pair(3, 20)]))
    return label, labeller


@pytest.mark.parametrize(("names", "works"), [(["tiny"], True), (["tiny", "small"], False), ([], False)])
def test_a_server_with_one_model_is_asked_for_that_one(names: list[str], works: bool) -> None:
    listed = {"data": [{"id": name} for name in names]}
    server = Server((404, {"error": "no model 'default'"}), listed, completion("0"))
    label, _ = asked(endpoint(server, model="default"), PLAIN)
    assert [request.method for request in server.received[:2]] == ["POST", "GET"]
    if works:
        assert not label.error and server.requests[2]["model"] == "tiny"
    else:
        assert all(name in label.error for name in ("404", *names))


def test_an_openai_endpoint_gets_images_as_data_uris_and_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "secret")
    server = Server(completion("0", {"0": 0.6, " 1": 0.1, "-": 0.2, "The": 0.1}))
    label, labeller = asked(endpoint(server, token_env="MY_TOKEN"))
    (sent,) = server.requests
    (request,) = server.received
    assert (request.url.path, request.headers["authorization"]) == ("/v1/chat/completions", "Bearer secret")
    assert sent["model"] == "qwen" and sent["temperature"] == 0 and sent["max_tokens"] == 16
    assert sent["structured_outputs"] == {"choice": ["0", "1", "-1"]} and sent["top_logprobs"] == 20
    uris = [part["image_url"]["url"] for part in sent["messages"][0]["content"] if part["type"] == "image_url"]
    shown = [np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1])))) for uri in uris]
    expected = pair(3, 20)
    assert (shown[0] == expected.first.frames).all() and (shown[1] == expected.second.frames).all()
    assert label.value == 0 and label.probabilities == pytest.approx((0.6 / 0.9, 0.1 / 0.9, 0.2 / 0.9))
    assert (labeller.stats.prompt_tokens, labeller.stats.sampled_tokens) == (11, 2)


def test_without_guidance_free_text_is_asked_about_once_more() -> None:
    server = Server(completion("I prefer Image 2.", {"I": 0.9, "0": 0.1}))
    label, labeller = asked(endpoint(server), PLAIN)
    assert len(server.requests) == 2 and labeller.stats.not_understood == 1
    assert not any("structured_outputs" in request for request in server.requests)
    assert label.value == -1 and label.probabilities is None  # of another answer than the one that was given


REFUSED = (400, {"error": {"message": "Unrecognized request argument"}})


@pytest.mark.parametrize("first", [REFUSED, (422, {"detail": "extra"})])
def test_an_endpoint_that_refuses_to_enforce_choices_is_asked_without(
    first: Any, caplog: pytest.LogCaptureFixture
) -> None:
    server = Server(first, completion("1"))
    chosen = endpoint(server, logprobs=False)
    assert asked(chosen)[0].value == 1 and asked(chosen)[0].value == 1
    assert ["structured_outputs" in request for request in server.requests] == [True, False, False]
    assert len(caplog.messages) == 1  # the warning comes once


def test_a_reason_and_a_verdict_are_asked_for_as_openai_asks_for_json(caplog: pytest.LogCaptureFixture) -> None:
    options = LabelsSection(steps=1, both_orders=False, guided="reason")
    reply = completion('{"reason": "It is upright.", "verdict": 1}')
    server = Server(reply)
    assert asked(endpoint(server), options)[0].value == 1
    (sent,) = server.requests
    schema = sent["response_format"]["json_schema"]["schema"]
    assert sent["response_format"]["type"] == "json_schema" and schema["properties"]["verdict"] == {"enum": [0, 1, -1]}
    assert sent["max_tokens"] == 416 and "structured_outputs" not in sent and "logprobs" not in sent
    refusing = Server(REFUSED, reply)
    chosen = endpoint(refusing)
    assert asked(chosen, options)[0].value == 1 and asked(chosen, options)[0].value == 1
    assert ["response_format" in request for request in refusing.requests] == [True, False, False]
    assert "cannot be held to a grammar" in caplog.text


def test_the_plain_generate_of_the_fork() -> None:
    server = Server({"text": "<think>hm</think>Image 2 is better."}, {"text": "1"})
    endpoint = HTTPEndpoint(EndpointSection(url="http://vlm:8001/generate"), True, httpx.MockTransport(server))
    label, _ = asked(endpoint, LabelsSection(both_orders=False))
    describe, summarise = server.requests
    assert [request.url.path for request in server.received] == ["/generate"] * 2
    kinds = [part["type"] for part in describe["messages"][0]["content"]]
    assert kinds == ["text", "image", "text", "image", "text"] and describe["max_tokens"] == 512
    assert describe["messages"][0]["content"][1]["image"].startswith("data:image/png;base64,")
    assert summarise["max_tokens"] == 16 and "Image 2 is better." in summarise["messages"][0]["content"][0]["text"]
    assert label.value == 1


def test_a_busy_server_is_asked_again() -> None:
    server = Server((503, b"busy"), (429, b"slow down", {"retry-after": "1"}), completion("1"))
    started = time.monotonic()
    label, labeller = asked(endpoint(server))
    assert label.value == 1 and labeller.stats.retries == 2 and time.monotonic() - started >= 1


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((401, {"detail": "no token"}), "HTTP 401.*no token"),
        ((400, b"bad"), "HTTP 400: bad"),
        ({"choices": []}, "no chat completion"),
        ({"choices": [{"message": {"content": [{"type": "text", "text": "1"}]}}]}, "no chat completion"),
        ({"choices": [{"message": {"content": 0}}]}, "no chat completion"),
        ([1], "no chat completion"),
    ],
)
def test_what_is_no_answer_is_an_error_at_once(reply: Any, message: str) -> None:
    server = Server(reply)
    label, labeller = asked(endpoint(server), PLAIN)
    assert len(server.requests) == 1 and label.answers == ()
    assert re.search(message, label.error)
    assert labeller.stats.errors == 1


@pytest.mark.parametrize("reply", [(500, b"oops"), b"not json"])
def test_failures_that_may_pass_are_errors_after_all_attempts(reply: Any) -> None:
    server = Server(reply)
    label, _ = asked(endpoint(server), LabelsSection(steps=1, both_orders=False, attempts=2))
    assert len(server.requests) == 2 and "no answer in 2 attempts" in label.error


def test_a_server_that_goes_away_is_waited_for_and_one_that_never_was_there_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rl_vlm.asking._FIRST_PAUSE_S", 0.001)
    there = [True, False, False, False, True]

    def reply(request: httpx.Request) -> httpx.Response:
        if not there.pop(0):
            raise httpx.ConnectError("connection refused")
        return httpx.Response(200, json=completion("1"))

    def served() -> HTTPEndpoint:
        return HTTPEndpoint(EndpointSection(url="http://vlm/v1"), transport=httpx.MockTransport(reply))

    label, labeller = asked(served(), LabelsSection(both_orders=False, attempts=1))  # described; gone; summarised
    assert label.value == 1 and labeller.stats.retries == 3 and not there
    assert caplog.text.count("The labeller is busy") == 1
    there += [False] * 9
    label, _ = asked(served(), LabelsSection(both_orders=False, attempts=2))
    assert "no answer in 2 attempts: http://vlm/v1/chat/completions gave no answer: ConnectError" in label.error
    assert len(there) == 7


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(("limit", "expected"), [(None, 40), (7, 7)])
def test_all_pairs_go_out_at_once_unless_that_is_limited(plain: bool, limit: int | None, expected: int) -> None:
    inside = 0
    most = 0

    async def slow(request: httpx.Request) -> httpx.Response:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.05 if limit is None else 0.005)
        inside -= 1
        return httpx.Response(200, json={**completion("0"), "text": "0"})

    section = EndpointSection(url="http://vlm/v1", max_in_flight=limit)
    endpoint = HTTPEndpoint(section, plain, httpx.MockTransport(slow))
    labeller = VLMLabeller(endpoint, PROMPTS, LabelsSection(steps=1, endpoint=section))
    labels = asyncio.run(labeller.label(random_pairs(20)))
    assert most == expected and not any(label.error for label in labels)
    # It always answers for the first picture: blind to what is shown.
    assert [label.value for label in labels] == [-1] * 20
    assert labeller.stats.position_bias == 1.0 and labeller.stats.disagreements == 20


@pytest.mark.parametrize(
    ("variables", "url"),
    [
        ({}, "http://localhost:8000/generate"),
        ({"SERVER_HOST": "gpu1", "SERVER_PORT": "8001"}, "http://gpu1:8001/generate"),
        ({"SERVER_HOST": "::1"}, "http://[::1]:8000/generate"),
        ({"SERVER_URL": "http://x/generate", "SERVER_PORT": "1"}, "http://x/generate"),
    ],
)
def test_the_forks_variables_name_the_server(
    variables: dict[str, str], url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SERVER_URL", "SERVER_HOST", "SERVER_PORT"):
        monkeypatch.setenv(name, variables.get(name, ""))
    assert server_url() == url


def test_probabilities_of_choices_from_first_tokens() -> None:
    log = math.log
    found = choice_probabilities([("0", log(0.5)), ("-", log(0.2)), ("1", log(0.1)), ("x", log(0.2))], ("0", "1", "-1"))
    assert found == pytest.approx({"0": 0.625, "1": 0.125, "-1": 0.25})
    assert choice_probabilities([("yes", 0.0)], ("0", "1")) is None
    assert choice_probabilities([("0", 0.0)], ("0.1", "0.2")) is None
    assert choice_probabilities([("", 0.0), ("1", -1.0)], ("0", "1")) == {"0": 0.0, "1": 1.0}


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "http://localhost:80a0/v1",
        "http://localhost:80000/v1",
        "http:///v1",
        "http://a:secret/1@b/v1",
    ],
)
def test_an_address_that_cannot_be_read_is_refused_at_once_and_not_shown(url: str) -> None:
    with pytest.raises(UserInputError, match="address") as found:
        HTTPEndpoint(EndpointSection(url=url))
    assert "secret" not in str(found.value)
