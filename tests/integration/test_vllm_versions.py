"""Samples of several policy versions from vLLM: partial rollouts and in-flight updates, token by token against transformers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_support import adapted_policy, pictures, request, text_side
from policy_loop import MAX_CONTEXT
from version_support import (
    ROLLOUT,
    NewWeightsMeanwhile,
    check_named_versions,
    distances,
    model_of,
    new_adapters,
    random_payload,
)
from vllm_support import vllm_config

from rl_vlm.engines.base import BASE_MODEL, EngineError
from rl_vlm.engines.vllm_engine import VLLMEngine
from rl_vlm.types import Completion, GenerationRequest, InFlightUpdates, SampleChunk

pytestmark = [pytest.mark.timeout(600), pytest.mark.acceptance]

VERSIONS = (1, 2, 3)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folder(wide_folder: Path) -> Path:
    return wide_folder


@pytest.fixture(scope="module")
def models(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    place = tmp_path_factory.mktemp("adapters")
    return {version: model_of(folder, random_payload(folder, version), place) for version in VERSIONS}


@contextmanager
def vllm(folder: Path, mode: InFlightUpdates | None) -> Iterator[VLLMEngine]:
    engine = VLLMEngine(folder, vllm_config(MAX_CONTEXT, slots=3), mode)
    try:
        yield engine
    finally:
        asyncio.run(engine.close())


def test_pieces_of_partial_rollouts_are_as_likely_as_under_the_versions_that_they_name(
    folder: Path, tmp_path: Path
) -> None:
    with vllm(folder, None) as engine:
        group = asyncio.run(NewWeightsMeanwhile(folder, engine).group(ROLLOUT))
    print(f"partial rollouts: at most {check_named_versions(group, folder, tmp_path):.1e}")
    assert any(turn.pieces for one in group.trajectories for turn in one.turns)


@pytest.fixture(scope="module", params=["keep", "recompute"])
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[VLLMEngine]:
    """An engine with in-flight updates."""
    with vllm(folder, request.param) as engine:
        yield engine


def asked(folder: Path, **sampling: Any) -> list[GenerationRequest]:
    """Prompts of different lengths with one, two and no images; five samples together."""
    text, images = text_side(folder), pictures(np.random.default_rng(0), 3)
    sampling = {"max_new_tokens": 160, "temperature": 0.9, "ignore_eos": True} | sampling
    return [
        request(text, [images[0], "What is it?"], name="one", n=2, seeds=(1, 2), **sampling),
        request(text, [images[1], "And", images[2], "?"], name="two", n=2, seeds=(3, 4), **sampling),
        request(text, ["Nothing to see, only words. " * 3], name="none", seeds=(5,), **sampling),
    ]


def test_samples_that_adapters_change_under(engine: VLLMEngine, folder: Path, models: dict[int, Any]) -> None:
    first, *later = [random_payload(folder, version) for version in VERSIONS]

    async def run() -> tuple[list[Completion], list[Completion]]:
        await engine.load_adapter(first)
        async with new_adapters(engine, later, every=100):
            changing = await engine.generate(asked(folder))
        return changing, await engine.generate(asked(folder, max_new_tokens=8))

    changing, after = asyncio.run(run())
    for answer in changing:
        assert answer.policy_version == VERSIONS[0]
        for one in answer.samples:
            assert tuple(version for _, version in one.pieces) == VERSIONS
            assert sum(count for count, _ in one.pieces) == len(one.token_ids) == 160
    exact, kept = distances(folder, models, asked(folder), changing)
    print(f"{engine._versions._in_flight}: from a recomputation {exact}; from transformers with a kept cache {kept}")
    right, wrong = (exact, kept) if engine._versions._in_flight == "recompute" else (kept, exact)
    assert right.largest < TOLERANCE
    assert wrong.largest > 0.1  # the versions are far from each other
    # Samples that begin later have nothing of the older versions: not from vLLM's prefix cache, either.
    assert [answer.policy_version for answer in after] == [VERSIONS[-1]] * len(after)
    assert distances(folder, models, asked(folder), after)[0].largest < TOLERANCE


def test_streams_name_versions_and_the_base_model_stays(engine: VLLMEngine, folder: Path) -> None:
    async def run() -> tuple[list[SampleChunk], Completion]:
        base = replace(asked(folder)[2], request_id="base", min_version=BASE_MODEL)
        await engine.load_adapter(random_payload(folder, 3))
        async with new_adapters(engine, [random_payload(folder, 4), random_payload(folder, 5)], every=60):
            plain = asyncio.create_task(engine.generate([base]))
            chunks = [chunk async for chunk in engine.stream(asked(folder)[0])]
            return chunks, (await plain)[0]

    chunks, plain = asyncio.run(run())
    assert plain.policy_version == BASE_MODEL and plain.samples[0].pieces == ()
    for number in (0, 1):
        mine = [chunk for chunk in chunks if chunk.number == number]
        names = [chunk.policy_version for chunk in mine]
        assert names == sorted(names) and set(names) == {3, 4, 5}
        assert sum(len(chunk.token_ids) for chunk in mine) == 160


def test_an_adapter_that_is_refused_leaves_the_running_samples_as_they_are(engine: VLLMEngine, folder: Path) -> None:
    too_high = adapted_policy(folder, model__lora__rank=32).payload(6)

    async def run() -> Completion:
        await engine.load_adapter(random_payload(folder, 5))
        running = asyncio.create_task(engine.generate(asked(folder)[:1]))
        with pytest.raises(EngineError, match="version 6"):
            await engine.load_adapter(too_high)
        return (await running)[0]

    answer = asyncio.run(run())
    assert engine.version == answer.policy_version == 5
    assert [one.pieces for one in answer.samples] == [((160, 5),)] * 2
