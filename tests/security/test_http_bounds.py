"""What one request may cost: fields, parts, pixels, log-probabilities, keys and values, choices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from core_support import text_side
from http_attacks import CHAT, chat_body, unknown_keys
from http_support import CONTEXT, EngineBackend, Server, data_uri, serving
from PIL import Image

from rl_vlm.config import HTTPSection
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.http import reader as module
from rl_vlm.http.app import json_bytes
from rl_vlm.http.reader import image_file, seen_image
from rl_vlm.http.replies import Asked, ChatReply
from rl_vlm.http.schema import ChatRequest, parse_body
from rl_vlm.models.families.qwen_vl import ImageProcessorSpec, patchify
from rl_vlm.types import (
    Completion,
    EncodedImage,
    GenerationRequest,
    Sample,
    SamplingParams,
    StopReason,
)

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server(engine: TransformersEngine, tiny_folder: Path) -> Iterator[Server]:
    with serving(EngineBackend(engine), tiny_folder) as server:
        yield server


def refusal(server: Server, body: bytes, path: str = CHAT) -> str:
    reply = httpx.post(server.url + path, content=body, headers=JSON, timeout=60)
    assert reply.status_code == 400, (reply.status_code, reply.text[:200])
    return str(reply.json()["error"]["message"] if path == CHAT else reply.json()["detail"])


def test_unknown_fields_are_counted_before_they_are_named(server: Server) -> None:
    assert "5002 fields" in refusal(server, unknown_keys(5000))
    reply = httpx.post(server.url + CHAT, content=unknown_keys(30), headers=JSON, timeout=60)
    assert reply.headers["X-Ignored-Fields"] == ", ".join(map(str, range(16)))  # the first ones only
    reply = httpx.post(server.url + CHAT, content=chat_body(**{"a\r\nX-Evil: 1": 1}), headers=JSON, timeout=60)
    assert reply.headers["X-Ignored-Fields"] == "?" and "X-Evil" not in reply.headers


def test_a_request_with_all_parts_that_it_may_have_is_answered(server: Server) -> None:
    parts = [{"type": "text", "text": "", "more": {"of": [1, 2, {"it": None}]}}] * 1000
    body = json.dumps({"messages": [{"role": "user", "content": parts}], "max_tokens": 1}).encode()
    assert httpx.post(f"{server.url}/generate", content=body, headers=JSON, timeout=60).status_code == 200


def test_the_product_of_samples_tokens_and_alternatives_is_bounded(
    engine: TransformersEngine, tiny_folder: Path
) -> None:
    with serving(EngineBackend(engine), tiny_folder, max_reply_values=1000) as server:
        body = chat_body(n=4, max_tokens=20, logprobs=True, top_logprobs=20)
        assert "top_logprobs) is more than 1000" in refusal(server, body)
        fits = httpx.post(
            server.url + CHAT, content=chat_body(n=2, logprobs=True, top_logprobs=20), headers=JSON, timeout=60
        )
        tokens = [len(choice["logprobs"]["content"]) for choice in fits.json()["choices"]]
        assert max(tokens) <= 1000 // (2 * 21)  # without max_tokens an answer is cut to what fits


def test_a_log_probability_of_minus_infinity_is_null(tiny_folder: Path) -> None:
    """JSON has no infinity."""
    sample = Sample(np.array([5, 6], np.int32), np.array([-0.5, -np.inf], np.float32), StopReason.LENGTH)
    ids = np.zeros(3, np.int32)
    asked = [Asked(GenerationRequest("id", ids, SamplingParams(2)), ids)]
    reply = ChatReply(text_side(tiny_folder).codec, asked, "name", parse_body(chat_body(logprobs=True), ChatRequest))
    content = json.loads(json_bytes(reply.whole([Completion("x", ids, (sample,), 7)])))["choices"][0]["logprobs"]
    assert [token["logprob"] for token in content["content"]] == [-0.5, None]


def test_the_pixels_of_a_request_are_bounded_before_one_is_decoded(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("an image was decoded")

    monkeypatch.setattr(module, "seen_image", never)
    uri = data_uri(Image.new("L", (4096, 4096)), "webp")
    parts = [{"type": "image", "image": uri}] * 13
    body = json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()
    message = refusal(server, body, "/generate")
    assert "pixels together" in message or "tokens" in message, message


def test_a_request_that_no_memory_can_hold_is_the_clients_error(tiny_folder: Path) -> None:
    engine = TransformersEngine(tiny_folder, max_context=CONTEXT, max_kv_tokens=2000)
    with serving(EngineBackend(engine), tiny_folder) as server:
        assert "ask for fewer samples" in refusal(server, chat_body(n=8, max_tokens=500))
        assert "ask for fewer samples" in refusal(server, chat_body(n=8, max_tokens=500, stream=True))
        fits = chat_body(n=4, max_tokens=200)
        assert httpx.post(server.url + CHAT, content=fits, headers=JSON, timeout=60).is_success
    asyncio.run(engine.close())


@pytest.mark.slow
def test_sixteen_photos_of_twelve_megapixels_are_answered(server: Server) -> None:
    rough = np.random.default_rng(0).integers(0, 256, (63, 84, 3), dtype=np.uint8)
    photo = Image.fromarray(rough).resize((4032, 3024), Image.Resampling.BILINEAR)
    parts = [{"type": "image_url", "image_url": {"url": data_uri(photo, "jpeg", quality=90)}}] * 16
    body = {"model": "tiny", "messages": [{"role": "user", "content": parts}], "max_tokens": 2}
    reply = httpx.post(server.url + CHAT, json=body, timeout=300)
    assert reply.status_code == 200, reply.text[:300]
    assert reply.json()["usage"]["prompt_tokens"] > 16


def test_a_photo_is_kept_in_the_size_that_the_model_sees() -> None:
    spec = ImageProcessorSpec(min_pixels=4096, max_pixels=65_536)
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (600, 800, 3), dtype=np.uint8))
    for kind in ("png", "webp"):
        seen = seen_image(image_file(data_uri(noise, kind, lossless=True), HTTPSection()), spec, HTTPSection())
        assert seen.width * seen.height <= 65_536 and seen.width % 32 == 0
        ours, grid = patchify(spec, seen)
        theirs, same = patchify(spec, EncodedImage.from_pil(noise))
        assert grid == same and np.array_equal(ours, theirs)
    small = Image.new("RGB", (40, 40))
    assert spec.shrunk(small) is small


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"guided_choice": ["a much longer answer than that"], "max_tokens": 2}, "tokens with its end"),
        ({"guided_choice": ["e\u0301t\u00e9", "x"], "max_tokens": 50}, "NFC"),
        ({"guided_choice": ["yes, of course"], "max_tokens": 50, "stop": ["of"]}, "would cut the choice"),
        ({"min_tokens": 9, "max_tokens": 2}, "min_tokens"),
    ],
)
def test_what_the_client_did_wrong_is_no_error_of_the_server(
    server: Server, fields: dict[str, Any], words: str
) -> None:
    assert words in refusal(server, chat_body(**fields))
    assert words in refusal(server, chat_body(stream=True, **fields))
