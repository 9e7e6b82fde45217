"""Streaming and alternatives of the transformers engine: the same tokens as without, piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_support import picture, plain_model, reference_logits, request
from engine_support import endless, until

from rl_vlm.engines.base import BASE_MODEL, EngineError
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.models.loading import TextSide
from rl_vlm.types import GenerationRequest, SampleChunk


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(tiny_folder, max_context=1024)
    yield engine
    asyncio.run(engine.close())


def ask(text: TextSide, name: str = "r", **sampling: Any) -> GenerationRequest:
    image = picture(np.random.default_rng(1))
    return request(
        text, [image, "Say something."], name=name, **{"max_new_tokens": 24, "n": 2, "seeds": (1, 2), **sampling}
    )


async def read(engine: TransformersEngine, asked: GenerationRequest) -> list[SampleChunk]:
    async with asyncio.timeout(120):
        return [chunk async for chunk in engine.stream(asked)]


def joined(chunks: Sequence[SampleChunk], number: int) -> tuple[list[int], list[float], list[Any], list[Any]]:
    mine = [chunk for chunk in chunks if chunk.number == number]
    return (
        [token for chunk in mine for token in chunk.token_ids.tolist()],
        [value for chunk in mine for value in chunk.logprobs.tolist()],
        [alternatives for chunk in mine for alternatives in chunk.top_logprobs],
        [chunk.stop_reason for chunk in mine],
    )


@pytest.mark.parametrize("more", [{}, {"stop": ("e", "o")}, {"choices": ("red", "redder", "12")}, {"top_logprobs": 4}])
def test_chunks_join_to_what_generate_gives(engine: TransformersEngine, text: TextSide, more: dict[str, Any]) -> None:
    asked = ask(text, **more)
    (whole,) = asyncio.run(engine.generate([asked]))
    chunks = asyncio.run(read(engine, asked))
    for number, sample in enumerate(whole.samples):
        tokens, logprobs, alternatives, reasons = joined(chunks, number)
        assert tokens == sample.token_ids.tolist()
        np.testing.assert_allclose(logprobs, sample.logprobs, atol=1e-5)
        assert reasons[-1] is sample.stop_reason and set(reasons[:-1]) <= {None}
        assert [[token for token, _ in one] for one in alternatives] == [
            [token for token, _ in one] for one in sample.top_logprobs
        ]
    assert all(chunk.token_ids.dtype == np.int32 and chunk.logprobs.dtype == np.float32 for chunk in chunks)
    assert {chunk.policy_version for chunk in chunks} == {0}


def test_tokens_come_while_others_are_still_to_be_sampled(engine: TransformersEngine, text: TextSide) -> None:
    asked = ask(text, n=1, seeds=(5,), max_new_tokens=200)
    with endless(engine, text):
        chunks = asyncio.run(read(engine, asked))
    assert len(chunks) > 5
    assert max(len(chunk.token_ids) for chunk in chunks) < 190


def test_a_slow_reader_gets_longer_chunks_and_loses_nothing(engine: TransformersEngine, text: TextSide) -> None:
    asked = ask(text, max_new_tokens=100)

    async def slowly() -> list[SampleChunk]:
        chunks = []
        async for chunk in engine.stream(asked):
            chunks.append(chunk)
            await asyncio.sleep(0.05)
        return chunks

    with endless(engine, text):
        (whole,) = asyncio.run(engine.generate([asked]))
        chunks = asyncio.run(slowly())
    assert max(len(chunk.token_ids) for chunk in chunks) > 3
    for number, sample in enumerate(whole.samples):
        assert joined(chunks, number)[0] == sample.token_ids.tolist()


@pytest.mark.parametrize("way", ["closed", "cancelled"])
def test_a_reader_that_goes_away_frees_its_rows_and_others_go_on(
    engine: TransformersEngine, text: TextSide, way: str
) -> None:
    other = ask(text, "other", max_new_tokens=60)

    async def leave() -> list[SampleChunk]:
        staying = asyncio.ensure_future(read(engine, other))
        stream = engine.stream(ask(text, "leaves", n=6, seeds=None, max_new_tokens=900))
        first = await anext(stream)
        assert len(first.token_ids)
        if way == "closed":
            await stream.aclose()
        else:
            waiting = asyncio.ensure_future(read_on(stream))
            await asyncio.sleep(0.02)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await until_rows(engine, 2)
        return await staying

    with endless(engine, text):
        (whole,) = asyncio.run(engine.generate([other]))
        chunks = asyncio.run(leave())
    assert joined(chunks, 1)[0] == whole.samples[1].token_ids.tolist()
    assert engine.stats().running == 0


def test_a_failing_step_ends_the_stream_after_the_tokens_it_had(
    engine: TransformersEngine, text: TextSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, calls = engine.backbone.logits, 0

    def fails(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise torch.OutOfMemoryError("out of memory")
        return logits(*args)

    monkeypatch.setattr(engine.backbone, "logits", fails)
    got = 0

    async def count() -> None:
        nonlocal got
        async for chunk in engine.stream(ask(text, n=1, seeds=(1,))):
            got += len(chunk.token_ids)

    with endless(engine, text), pytest.raises(EngineError, match="out of memory"):
        asyncio.run(count())
    assert got == 3


# --- alternatives


def test_alternatives_are_the_head_of_the_distribution_that_was_sampled_from(
    tiny_folder: Path, engine: TransformersEngine, text: TextSide
) -> None:
    model = plain_model(tiny_folder)
    for more in ({"temperature": 0.7}, {"temperature": 0.0, "seeds": None}, {"top_k": 3}):
        asked = ask(text, **{"n": 1, "seeds": (3,), "top_logprobs": 5, **more})
        (answer,) = asyncio.run(engine.generate([asked]))
        sample = answer.samples[0]
        ids = np.concatenate([answer.prompt_ids, sample.token_ids])
        with torch.no_grad():
            logits = reference_logits(tiny_folder, model, ids, asked.images)[len(answer.prompt_ids) - 1 : -1]
        logits[:, torch.from_numpy(text.codec.suppressed_token_ids(text.vocab_size))] = float("-inf")
        logits = logits / (asked.sampling.temperature or 1.0)
        if asked.sampling.top_k:
            logits[logits < logits.topk(3, -1).values[:, -1:]] = float("-inf")
        values, best = torch.log_softmax(logits, -1).topk(5, -1)
        assert len(sample.top_logprobs) == len(sample.token_ids)
        for place, alternatives in enumerate(sample.top_logprobs):
            assert len(alternatives) == (3 if asked.sampling.top_k else 5)
            assert [token for token, _ in alternatives] == best[place, : len(alternatives)].tolist()
            np.testing.assert_allclose(
                [value for _, value in alternatives], values[place, : len(alternatives)], atol=5e-5
            )
            own = dict(alternatives).get(int(sample.token_ids[place]))
            assert own is None or own == pytest.approx(float(sample.logprobs[place]), abs=1e-6)


# --- the stream itself


# --- helpers


async def read_on(stream: Any) -> list[SampleChunk]:
    return [chunk async for chunk in stream]


async def until_rows(engine: TransformersEngine, rows: int) -> None:
    await until(lambda: engine.stats().running == rows)


def test_streams_and_calls_of_the_base_model_do_not_mix_with_the_policys(
    engine: TransformersEngine, text: TextSide
) -> None:
    async def both() -> list[list[SampleChunk]]:
        return await asyncio.gather(read(engine, ask(text, min_version=BASE_MODEL)), read(engine, ask(text)))

    base, policy = asyncio.run(both())
    assert {chunk.policy_version for chunk in base} == {BASE_MODEL}
    assert {chunk.policy_version for chunk in policy} == {0}
