"""What the transformers engine computes together: prompts by length, images once, neither without a bound."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_support import picture, pictures, plain_model, request, run_config
from engine_support import endless, until

from rl_vlm.engines.decoder import Decoder
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.models.images import PixelLimits
from rl_vlm.models.loading import TextSide, load_text_side
from rl_vlm.models.qwen_vl import _VISION_PATCHES, Backbone
from rl_vlm.rollout.env_runner import RolloutWorker
from rl_vlm.runs.train import inspect_run
from rl_vlm.serving.replica import build_engine
from rl_vlm.types import UserInputError


def backbone_of(folder: Path, text: TextSide, **more: Any) -> Backbone:
    model = plain_model(folder).requires_grad_(False)  # features of a tower that is trained are not kept
    return Backbone(model, text.images, text.codec.suppressed_token_ids(text.vocab_size), **more)


# --- prompts


def test_requests_join_running_ones_in_prefills_sorted_by_length(
    tiny_folder: Path, text: TextSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TransformersEngine(tiny_folder, max_context=1024)
    prefills: list[tuple[int, list[int]]] = []  # rows that were running, lengths of the prompts
    prefill = Decoder._prefill

    def watched(self: Decoder, jobs: list[Any]) -> Any:
        prefills.append((self.num_rows, [len(job.prompt_ids) for job in jobs]))
        return prefill(self, jobs)

    monkeypatch.setattr(Decoder, "_prefill", watched)
    monkeypatch.setattr("rl_vlm.engines.decoder.PREFILL_TOKENS", 130)
    lengths = [40, 3, 25, 60, 1, 33]

    async def join() -> None:
        running = asyncio.ensure_future(engine.generate([request(text, ["?"], max_new_tokens=400)]))
        await until(lambda: engine.stats().running == 1)
        joining = [request(text, ["a " * length], name=str(length), max_new_tokens=3) for length in lengths]
        answers = await engine.generate(joining)
        assert [answer.request_id for answer in answers] == [str(length) for length in lengths]
        assert not running.done()
        running.cancel()
        await until(lambda: engine.stats().running == 0)

    with endless(engine, text):
        asyncio.run(join())
    joined = prefills[1:]
    assert all(rows >= 1 for rows, _ in joined)
    flat = [length for _, batch in joined for length in batch]
    assert len(flat) == len(lengths) and flat == sorted(flat)
    assert len(joined) > 1 and all(len(batch) * max(batch) <= 130 for _, batch in joined)
    assert engine.stats().mean_batch > 1
    asyncio.run(engine.close())


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
    assert sum(features.num_bytes for features in backbone._cache.values()) <= 3 * size
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
    assert together.vision_passes == 40 and all(
        torch.equal(a.merged, b.merged) for a, b in zip(expected, found, strict=True)
    )
    run = run_config(tiny_folder, deterministic=True, serving__engine="transformers")
    assert build_engine(tiny_folder, run).backbone._most_patches == 0


def test_more_images_than_one_pass_takes_give_the_same_features(
    tiny_folder: Path, text: TextSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = pictures(np.random.default_rng(2), 9)
    whole = backbone_of(tiny_folder, text).image_features(images)
    monkeypatch.setitem(_VISION_PATCHES, "cpu", 40)
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

    def made(model: Path, **settings: Any) -> Any:
        return settings["pixels"]

    monkeypatch.setattr("rl_vlm.engines.vllm_engine.VLLMEngine", made)
    vllm = run.model_copy(update={"serving": run.serving.model_copy(update={"engine": "vllm"})})
    assert build_engine(tiny_folder, vllm) == PixelLimits(4096, 6144)  # type: ignore[comparison-overlap]


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
