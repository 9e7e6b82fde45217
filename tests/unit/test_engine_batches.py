"""What the transformers engine computes together: prompts by length, images once, neither without a bound."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_support import picture, pictures, plain_model, reference_logits, request, run_config
from engine_support import endless, out_of_memory, until

from rl_vlm.engines.base import EngineError, RequestTooLargeError
from rl_vlm.engines.cache import RowCache
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.models.families.qwen_fast import QwenBackbone
from rl_vlm.models.families.qwen_vl import PATCHES_AT_ONCE
from rl_vlm.models.images import PixelLimits, TextSide
from rl_vlm.models.loading import load_text_side
from rl_vlm.rollout.env_runner import RolloutWorker
from rl_vlm.runs.train import inspect_run
from rl_vlm.serving.replica import build_engine
from rl_vlm.types import GenerationRequest, SampleChunk, UserInputError


def backbone_of(folder: Path, text: TextSide, **more: Any) -> QwenBackbone:
    model = plain_model(folder).requires_grad_(False)  # features of a tower that is trained are not kept
    return QwenBackbone(model, text.images, text.codec.suppressed_token_ids(text.vocab_size), **more)


# --- prompts


def test_requests_join_running_ones(engine: TransformersEngine, text: TextSide) -> None:
    async def join() -> None:
        running = asyncio.ensure_future(engine.generate([request(text, ["?"], max_new_tokens=400)]))
        await until(lambda: engine.stats().running == 1)
        joining = [request(text, ["a " * length], name=str(length), max_new_tokens=3) for length in (40, 3, 25)]
        answers = await engine.generate(joining)
        assert [answer.request_id for answer in answers] == ["40", "3", "25"]
        assert not running.done() and engine.stats().mean_batch > 1
        running.cancel()
        await until(lambda: engine.stats().running == 0)

    with endless(engine, text):
        asyncio.run(join())


def test_a_prompt_is_computed_once_for_all_its_samples(tiny_folder: Path, text: TextSide) -> None:
    engine = TransformersEngine(tiny_folder, max_context=512)
    asked = request(text, [picture(np.random.default_rng(0)), "What?"], n=6, max_new_tokens=4)
    (answer,) = asyncio.run(engine.generate([asked]))
    stats = engine.stats()
    assert stats.prompt_tokens == len(answer.prompt_ids)
    assert stats.generated_tokens == sum(len(sample.token_ids) for sample in answer.samples)
    assert (stats.image_cache_misses, stats.image_cache_hits, stats.requests) == (1, 0, 1)
    asyncio.run(engine.generate([asked]))
    assert (engine.stats().image_cache_misses, engine.stats().image_cache_hits) == (1, 1)
    asyncio.run(engine.close())


# --- images


def test_the_image_cache_drops_what_was_used_longest_ago(tiny_folder: Path, text: TextSide) -> None:
    rng = np.random.default_rng(1)
    images = [picture(rng, 64, 64) for _ in range(4)]
    size = backbone_of(tiny_folder, text).image_features(images[:1])[0].num_bytes
    backbone = backbone_of(tiny_folder, text, cache_bytes=3 * size)
    backbone.image_features(images[:3])
    backbone.image_features(images[:1])  # the second is now the oldest
    backbone.image_features(images[3:])
    assert (backbone.cache_misses, backbone.cache_hits) == (4, 1)
    backbone.image_features([images[0], images[2], images[3]])
    assert backbone.cache_misses == 4
    backbone.image_features([images[1]])
    assert backbone.cache_misses == 5


def test_features_of_a_deterministic_run_do_not_depend_on_what_is_cached(tiny_folder: Path, text: TextSide) -> None:
    """Images that go through the tower together differ in their last bits from the same images alone."""
    images = [picture(np.random.default_rng(k), 32, 32) for k in range(40)]
    alone, together = (backbone_of(tiny_folder, text, image_by_image=True) for _ in range(2))
    expected = [alone.image_features([image])[0] for image in images]
    found = together.image_features(images)
    assert all(torch.equal(a.merged, b.merged) for a, b in zip(expected, found, strict=True))
    run = run_config(tiny_folder, deterministic=True, serving__engine="transformers")
    assert build_engine(tiny_folder, run).backbone._most_patches == 0


def test_more_images_than_one_pass_takes_give_the_same_features(
    tiny_folder: Path, text: TextSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = pictures(np.random.default_rng(2), 9)
    whole = backbone_of(tiny_folder, text).image_features(images)
    monkeypatch.setitem(PATCHES_AT_ONCE, "cpu", 40)
    backbone = backbone_of(tiny_folder, text)
    passes = []
    monkeypatch.setattr(
        backbone, "_encode", lambda batch, encode=backbone._encode: passes.append(len(batch)) or encode(batch)
    )
    for one, two in zip(whole, backbone.image_features(images), strict=True):
        torch.testing.assert_close(one.merged, two.merged, atol=1e-5, rtol=0)
    assert len(passes) > 3 and sum(passes) == 9


def test_pixel_limits_of_the_configuration_reach_engines_learners_and_workers(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_config(tiny_folder, model__min_pixels=4096, model__max_pixels=6144, serving__max_context=256)
    engine = build_engine(tiny_folder, run)
    asyncio.run(engine.close())
    assert isinstance(engine, TransformersEngine)
    specs = [
        engine.backbone.images,
        PolicyModel(tiny_folder, run).backbone.images,
        RolloutWorker(run, "run", tiny_folder)._text.images,
    ]
    assert [(spec.min_pixels, spec.max_pixels) for spec in specs] == [(4096, 6144)] * 3
    plain, limited = (inspect_run(run_config(tiny_folder, **more)) for more in ({}, {"model__max_pixels": 2048}))
    assert limited["train_image_tokens"] < plain["train_image_tokens"]


def test_pixel_limits_hold_for_counting_and_for_encoding(tiny_folder: Path) -> None:
    limits = PixelLimits(64 * 64, 64 * 96)
    text = load_text_side(tiny_folder, limits)
    backbone = backbone_of(tiny_folder, text)
    rng = np.random.default_rng(3)
    for width, height in ((20, 20), (64, 64), (300, 100), (500, 500)):
        image = picture(rng, width, height)
        tokens = text.images.count_tokens(width, height)
        assert 4 <= tokens <= 6
        assert backbone.image_features([image])[0].merged.shape[0] == tokens
    with pytest.raises(UserInputError, match="model.max_pixels"):
        load_text_side(tiny_folder, PixelLimits(9000, 5000))
    with pytest.raises(UserInputError, match="1024 pixels"):
        load_text_side(tiny_folder, PixelLimits(1, 1000))


# --- Streaming and alternatives of the transformers engine: the same tokens as without, piece by piece


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


def test_a_reader_that_goes_away_frees_its_rows_and_others_go_on(engine: TransformersEngine, text: TextSide) -> None:
    other = ask(text, "other", max_new_tokens=200)

    async def leave() -> list[SampleChunk]:
        staying = asyncio.ensure_future(read(engine, other))
        stream = engine.stream(ask(text, "leaves", n=6, seeds=None, max_new_tokens=900))
        assert len((await anext(stream)).token_ids)
        await stream.aclose()
        await until(lambda: engine.stats().running == 2)
        return await staying

    with endless(engine, text):
        (whole,) = asyncio.run(engine.generate([other]))
        chunks = asyncio.run(leave())
    assert joined(chunks, 1)[0] == whole.samples[1].token_ids.tolist()
    assert engine.stats().running == 0


def test_a_failing_step_ends_the_stream_after_the_tokens_it_had(
    engine: TransformersEngine, text: TextSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    out_of_memory(engine, 4, monkeypatch)
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


# --- The engine admits no more requests than their keys and values have memory for; the others wait


LIMIT = 64 * 24  # tokens


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The tokens that all caches together have memory for, after each time that one of them takes some."""
    caches: dict[int, RowCache] = {}
    sizes: list[int] = []
    reserve = RowCache._reserve

    def noted(self: RowCache, *arguments: Any) -> None:
        reserve(self, *arguments)
        caches[id(self)] = self
        keys = [cache._keys[0] for cache in caches.values() if cache._keys]
        sizes.append(sum(tensor.shape[0] * tensor.shape[2] for tensor in keys))

    monkeypatch.setattr(RowCache, "_reserve", noted)
    yield sizes


def requests(text: TextSide, count: int, policies: tuple[str, ...]) -> list[GenerationRequest]:
    """Of all sizes, the largest of which take nearly everything."""
    rng = np.random.default_rng(0)
    made = []
    for k in range(count):
        samples = int(2 ** rng.integers(0, 5))
        longest = min(LIMIT // samples // 64 * 64, 256) - 40
        asked = request(text, ["Which?"], name=f"r{k}", n=samples, max_new_tokens=int(rng.integers(1, longest)))
        made.append(dataclasses.replace(asked, policy=policies[k % len(policies)]))
    return made


@pytest.mark.parametrize("policies", [("policy",), ("a", "b", "c")])
def test_the_limit_holds_and_every_request_is_answered(
    tiny_folder: Path, text: TextSide, held: list[int], policies: tuple[str, ...]
) -> None:
    engine = TransformersEngine(tiny_folder, max_context=512, max_kv_tokens=LIMIT)
    asked = requests(text, 30, policies)

    async def live() -> None:
        answers = await asyncio.wait_for(asyncio.gather(*(engine.generate([one]) for one in asked)), 120)
        assert [len(answer.samples) for (answer,) in answers] == [one.sampling.n for one in asked]
        await engine.close()

    asyncio.run(live())
    assert LIMIT / 2 < max(held) <= LIMIT


def test_a_request_that_no_memory_can_hold_is_refused(tiny_folder: Path, text: TextSide) -> None:
    engine = TransformersEngine(tiny_folder, max_context=512, max_kv_tokens=LIMIT)

    async def live() -> None:
        with pytest.raises(RequestTooLargeError):
            await engine.generate([request(text, ["Which?"], name="r", n=64, max_new_tokens=100)])
        await engine.close()

    asyncio.run(live())
