"""What one request may cost: values of JSON, bodies in memory, pixels, log-probabilities, keys and values, choices."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import weakref
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from core_support import text_side
from http_attacks import CHAT, chat_body, head, many_parts, unknown_keys
from http_support import EngineBackend, Server, data_uri, serving, tiny_engine, wait_until
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from test_http_doors import connect

from rl_vlm.config import HTTPSection
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.http import gate as gates
from rl_vlm.http.budget import Budget
from rl_vlm.http.errors import RequestError
from rl_vlm.http.images import ImageReader
from rl_vlm.http.json_bounds import JSONBounds
from rl_vlm.http.kv_room import KVRoom
from rl_vlm.http.pixel_room import PixelRoom
from rl_vlm.http.reader import RequestReader
from rl_vlm.http.replies import ChatReply
from rl_vlm.http.schema import ChatChunk, ChatCompletion, GenerateRequest
from rl_vlm.models.images import ImageProcessorSpec, patchify, shrunk
from rl_vlm.models.memory.shape import ModelShape
from rl_vlm.types import Completion, EncodedImage, Sample, SampleChunk, SamplingParams, StopReason

# The configurations of the published Qwen3-VL models, by size.
PUBLISHED = json.loads((Path(__file__).parents[1] / "fixtures/qwen3_vl.json").read_text())

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Iterator[TransformersEngine]:
    with tiny_engine(tiny_folder) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: TransformersEngine, tiny_folder: Path) -> Iterator[Server]:
    with serving(EngineBackend(engine), tiny_folder) as server:
        yield server


def refusal(server: Server, body: bytes, path: str = CHAT) -> str:
    reply = httpx.post(server.url + path, content=body, headers=JSON, timeout=60)
    assert reply.status_code == 400, (reply.status_code, reply.text[:200])
    return str(reply.json()["error"]["message"] if path == CHAT else reply.json()["detail"])


@pytest.mark.parametrize(
    "body",
    [unknown_keys(100_000), many_parts(60_000), b'{"a":' + b"[" * 100_000, b'{"a":[' + b"{}," * 100_000, b'{"a":[' + b"1," * 100_000,
     b'{"a":[' + b'"",' * 100_000, b'"' * 400_000],
    ids=["keys", "parts", "nesting", "objects", "numbers", "texts", "quotes"],
)  # fmt: skip
def test_many_values_are_refused_before_they_are_parsed(server: Server, body: bytes) -> None:
    for path in (CHAT, "/generate"):
        assert "JSON values" in refusal(server, body, path)


def test_many_values_are_refused_while_they_arrive(server: Server) -> None:
    with connect(server, head(CHAT, 30 << 20) + b'{"a":[' + b"1," * 100_000) as sock:
        assert sock.recv(1000).startswith(b"HTTP/1.1 400 ")  # the other 30 MB have not been sent


def test_a_body_of_escapes_is_refused_and_a_text_of_them_is_not(engine: TransformersEngine, tiny_folder: Path) -> None:
    with serving(EngineBackend(engine), tiny_folder, max_text_chars=1000, max_body_mib=1) as server:
        assert "backslashes" in refusal(server, chat_body(user="\n" * 40_000))
        text = json.dumps("\U0001f600" * 900)  # twelve bytes a character
        assert text.count("\\") == 1800
        body = chat_body(
            messages=[{"role": "user", "content": "\U0001f600" * 100}], user="\U0001f600" * 900, max_tokens=1
        )
        assert httpx.post(server.url + CHAT, content=body, headers=JSON, timeout=60).is_success
        slashes = json.dumps({"a": "/" * 30_000}).replace("/", "\\/").encode()  # as PHP writes them
        JSONBounds(100, 2 * 1000 + (1 << 20) // 32).feed(slashes)


def test_unknown_fields_are_counted_before_they_are_named(server: Server) -> None:
    assert "5002 fields" in refusal(server, unknown_keys(5000))
    assert refusal(server, unknown_keys(3)).startswith("0: this field is not known")


def test_a_request_with_all_parts_that_it_may_have_is_answered(server: Server) -> None:
    parts = [{"type": "text", "text": "", "more": {"of": [1, 2, {"it": None}]}}] * 1000
    body = json.dumps({"messages": [{"role": "user", "content": parts}], "max_tokens": 1}).encode()
    assert httpx.post(f"{server.url}/generate", content=body, headers=JSON, timeout=60).status_code == 200


_VALUES = st.recursive(
    st.none() | st.text(alphabet='\\"[]{},:ab\n\u00e9\U0001f600') | st.integers(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='\\",{', max_size=4), inner, max_size=4)
    ),
    max_leaves=20,
)


def _count(value: Any) -> int:
    """Values inside, as they follow a comma or an opening bracket (an empty container has a bracket, too)."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else max(len(inner), 1) + sum(map(_count, inner))


@given(value=_VALUES, ascii_only=st.booleans(), cut=st.integers(1, 7))
def test_values_are_counted_however_strings_look_and_pieces_are_cut(value: Any, ascii_only: bool, cut: int) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only).encode()
    expected = _count(value)
    bounds = JSONBounds(max_values=10_000, max_escapes=10_000)
    for k in range(0, len(text), cut):
        bounds.feed(text[k : k + cut])
    assert bounds._values == expected
    assert bounds._quotes <= 4 * expected + 2


def test_large_bodies_wait_for_memory_and_small_ones_do_not(
    engine: TransformersEngine, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gates, "_LARGE_BODIES", 1)
    with serving(EngineBackend(engine), tiny_folder, max_body_mib=2) as server:
        size, start = 2 << 20, b'{"model":"tiny","user":"'
        holding = connect(server, head("/generate", size) + start)
        budget = server.gate._bodies
        wait_until(lambda: budget.left == 0)
        with connect(server, head("/generate", size) + start) as waiting:
            assert httpx.post(
                f"{server.url}/generate", content=chat_body(max_tokens=1), headers=JSON, timeout=60
            ).is_success
            waiting.settimeout(0.1)
            with pytest.raises(TimeoutError):
                waiting.recv(1)
        holding.close()
        wait_until(lambda: budget.left == size and server.gate.in_flight == 0)
        filled = chat_body(max_tokens=1, user="x" * (size - 200))
        assert httpx.post(server.url + CHAT, content=filled, headers=JSON, timeout=60).is_success
        chunked = httpx.post(server.url + CHAT, content=iter([filled]), headers=JSON, timeout=60)
        assert chunked.is_success and budget.left == size


def test_a_body_is_let_go_before_its_answer(engine: TransformersEngine, tiny_folder: Path) -> None:
    backend, inside, go_on = EngineBackend(engine), threading.Event(), threading.Event()
    answer = backend.generate

    async def generate(request: Any) -> Completion:
        inside.set()
        await asyncio.to_thread(go_on.wait, 30)
        return await answer(request)

    backend.generate = generate  # type: ignore[method-assign]
    with serving(backend, tiny_folder) as server, ThreadPoolExecutor() as pool:
        body = chat_body(max_tokens=1, user="x" * (20 << 20))
        reply = pool.submit(httpx.post, server.url + CHAT, content=body, headers=JSON, timeout=60)
        assert inside.wait(30)
        assert server.gate._bodies.left == server.gate._bodies._capacity
        go_on.set()
        assert reply.result().is_success


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_a_budget_is_taken_in_turns() -> None:
    async def work() -> None:
        budget = Budget(10)
        first = await budget.take(8)
        second, third = (asyncio.ensure_future(budget.take(amount)) for amount in (100, 1))
        await asyncio.sleep(0)
        assert not second.done() and not third.done()  # not past the one that waits
        second.cancel()
        await asyncio.sleep(0)
        last = await third
        assert budget.left == 1
        first.release()
        first.release()
        assert budget.left == 9
        fourth = asyncio.ensure_future(budget.take(10))
        fifth = asyncio.ensure_future(budget.take(1))
        await asyncio.sleep(0)
        last.release()  # lets the fourth in
        fourth.cancel()  # which does not take it any more
        await asyncio.sleep(0)
        assert (await fifth) and budget.left == 9

    run(work())


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


def _completion(samples: int, tokens: int, top: int) -> Completion:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 200, tokens).astype(np.int32)
    logprobs = np.append(-rng.random(tokens - 1), -np.inf).astype(np.float32)
    alternatives = tuple(tuple((k, -0.5 * k) for k in range(top)) for _ in range(tokens))
    sample = Sample(ids, logprobs, StopReason.LENGTH, alternatives)
    return Completion("x", np.zeros(3, np.int32), tuple([sample] * samples), 7)


def test_a_written_reply_is_what_the_schema_says(tiny_folder: Path) -> None:
    completion = _completion(2, 30, 3)
    codec = text_side(tiny_folder).codec
    for logprobs in (True, False):
        sampling = SamplingParams(30, n=2, top_logprobs=3)
        reply = ChatReply(
            codec, "id", 'a "choices":[] "logprobs":null', sampling=sampling, num_prompt_tokens=3, logprobs=logprobs
        )
        text = reply.whole(completion)
        found = ChatCompletion.model_validate_json(re.sub(rb'"logprob":null', b'"logprob":-1e9', text))
        assert list(json.loads(text)) == list(json.loads(found.model_dump_json()))
        assert (
            found.model == 'a "choices":[] "logprobs":null'
            and len(found.choices) == 2
            and found.usage.completion_tokens == 60
        )
        for choice in found.choices:
            assert (choice.logprobs is not None) == logprobs
        if not logprobs:
            continue
        assert found.choices[1].logprobs is not None
        for k, entry in enumerate(found.choices[1].logprobs.content):
            data = codec.token_bytes(int(completion.samples[1].token_ids[k]))
            assert entry.bytes == list(data) and entry.token == data.decode("utf-8", "replace")
            assert entry.logprob == pytest.approx(max(float(completion.samples[1].logprobs[k]), -1e9))
            assert [other.logprob for other in entry.top_logprobs] == [0.0, -0.5, -1.0]
        sample = completion.samples[0]
        grown = SampleChunk(0, sample.token_ids[:5], sample.logprobs[:5], 7, None, sample.top_logprobs[:5])
        chunks = [ChatChunk.model_validate_json(chunk) for chunk in reply.chunks(grown)]
        assert chunks[0].choices[0].delta["role"] == "assistant"
        assert all(chunk.object == "chat.completion.chunk" and chunk.usage is None for chunk in chunks)


def test_long_replies_are_not_written_on_the_event_loop(
    engine: TransformersEngine, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers: list[str] = []
    whole, chunks = ChatReply.whole, ChatReply.chunks

    def noted(method: Any) -> Any:
        def write(self: ChatReply, what: Any) -> Any:
            writers.append(threading.current_thread().name)
            return method(self, what)

        return write

    monkeypatch.setattr(ChatReply, "whole", noted(whole))
    monkeypatch.setattr(ChatReply, "chunks", noted(chunks))
    with serving(EngineBackend(engine), tiny_folder) as server:
        long = {"n": 8, "max_tokens": 30, "ignore_eos": True, "logprobs": True, "top_logprobs": 20}
        assert httpx.post(server.url + CHAT, content=chat_body(**long), headers=JSON, timeout=60).is_success
        assert writers and all(name.startswith("http-replies") for name in writers)
        writers.clear()
        assert httpx.post(server.url + CHAT, content=chat_body(max_tokens=3), headers=JSON, timeout=60).is_success
        assert not any(name.startswith("http-replies") for name in writers)


def test_the_pixels_of_a_request_are_bounded_before_one_is_decoded(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("an image was decoded")

    monkeypatch.setattr(ImageReader, "decode", never)
    uri = data_uri(Image.new("L", (4096, 4096)), "webp")
    parts = [{"type": "image", "image": uri}] * 13
    body = json.dumps({"messages": [{"role": "user", "content": parts}]}).encode()
    message = refusal(server, body, "/generate")
    assert "pixels together" in message or "tokens" in message, message


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
    reader = ImageReader(HTTPSection(), spec)
    for kind in ("png", "webp"):
        uri = data_uri(noise, kind, lossless=True)
        seen = reader.decode(reader.open(uri, "1"), "1")
        assert seen.width * seen.height <= 65_536 and seen.width % 32 == 0
        ours, grid = patchify(spec, seen)
        theirs, same = patchify(spec, EncodedImage.from_pil(noise))
        assert grid == same and np.array_equal(ours, theirs)
    small = Image.new("RGB", (40, 40))
    assert shrunk(spec, small) is small


def test_the_pixels_of_an_image_are_gone_before_the_next_is_decoded(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[weakref.ref[Image.Image]] = []
    decode = ImageReader.decode

    def noted(self: ImageReader, image: Image.Image, name: str) -> EncodedImage:
        assert [one() for one in seen] == [None] * len(seen)
        seen.append(weakref.ref(image))
        return decode(self, image, name)

    monkeypatch.setattr(ImageReader, "decode", noted)
    reader = RequestReader(text_side(tiny_folder), HTTPSection(), 4096)
    part = {"type": "image", "image": data_uri(Image.new("RGB", (64, 64)), "webp")}
    body = GenerateRequest.model_validate({"messages": [{"role": "user", "content": [part] * 4}]})
    assert len(reader.generate(body, "x", 0)[0].images) == len(seen) == 4


def test_few_pixels_are_decoded_at_a_time() -> None:
    room = PixelRoom(100)
    refused = pytest.raises(RequestError, match="being decoded")
    with room.taken(60, 1), room.taken(40, 1), refused, room.taken(1, 0.01):
        pass
    with room.taken(10_000, 1):  # alone
        pass
    assert room._left == 100


def test_requests_enter_the_engine_as_its_memory_allows() -> None:
    async def work() -> None:
        room = KVRoom(tokens=64_000, rows=512)
        large = [asyncio.ensure_future(room.take(16, 1000)) for _ in range(4)]
        await asyncio.sleep(0)
        assert [one.done() for one in large] == [True, False, False, False]
        small = asyncio.ensure_future(room.take(1, 100))
        await asyncio.sleep(0)
        assert small.done()  # not behind the large ones
        more = [asyncio.ensure_future(room.take(1, 100)) for _ in range(20)]
        await asyncio.sleep(0)
        assert (
            sum(one.done() for one in more) == 64_000 // (2 * 8 * 1024) - 1
        )  # the eighth that is theirs while others wait
        large[1].cancel()
        for one in [small, *more]:
            one.cancel() if not one.done() else one.result().release()
        large[0].result().release()
        await asyncio.sleep(0)
        assert large[2].done() and not large[3].done()
        large[2].result().release()
        (await large[3]).release()
        assert (room._rows, room._inside, room._small_rows, room._longest) == (0, 0, 0, 0)

    run(work())


def test_a_request_that_no_memory_can_hold_is_refused_and_others_wait(
    engine: TransformersEngine, tiny_folder: Path
) -> None:
    with serving(EngineBackend(engine), tiny_folder, kv_room=KVRoom(2000, 64)) as server, ThreadPoolExecutor() as pool:
        assert "memory for in one request: ask for fewer samples" in refusal(server, chat_body(n=8, max_tokens=500))
        bodies = [chat_body(n=4, max_tokens=200), chat_body(n=2, max_tokens=400)] * 3
        sent = [pool.submit(httpx.post, server.url + CHAT, content=body, headers=JSON, timeout=60) for body in bodies]
        assert [one.result().status_code for one in sent] == [200] * 6


def test_generate_without_a_length_is_cut_to_the_memory_as_chats_are(
    engine: TransformersEngine, tiny_folder: Path
) -> None:
    asked = {"messages": [{"role": "user", "content": "hi"}]}
    with serving(EngineBackend(engine), tiny_folder, kv_room=KVRoom(256, 64)) as server:
        assert httpx.post(f"{server.url}/generate", json=asked, timeout=60).status_code == 200


def test_keys_and_values_are_counted_as_the_model_has_them(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["2b"]))
    assert ModelShape.read(tmp_path).kv_bytes_per_token(2) == 114_688  # of bfloat16
    assert 64 * 4096 * 114_688 == 28 * 2**30


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"choice": ["a much longer answer than that"], "max_tokens": 2}, "tokens with its end"),
        ({"choice": ["e\u0301t\u00e9", "x"], "max_tokens": 50}, "NFC"),
        ({"choice": ["yes, of course"], "max_tokens": 50, "stop": ["of"]}, "would cut the choice"),
        ({"min_tokens": 9, "max_tokens": 2}, "min_tokens"),
    ],
)
def test_what_the_client_did_wrong_is_no_error_of_the_server(
    server: Server, fields: dict[str, Any], words: str
) -> None:
    assert words in refusal(server, chat_body(**fields))
    assert words in refusal(server, chat_body(stream=True, **fields))
