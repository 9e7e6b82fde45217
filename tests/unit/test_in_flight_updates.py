"""In-flight updates: a running sample takes a new version between two tokens, and each token keeps the version that sampled it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from core_support import pictures, request, text_side
from policy_loop import MAX_CONTEXT
from version_support import distances, model_of, random_payload

from rl_vlm.config import RolloutSection, parse_config
from rl_vlm.engines.decoder import Decoder
from rl_vlm.engines.rows import PreparedRequest
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.rollout.episodes import SampledTurn, request_turns
from rl_vlm.serving.replica import build_engine
from rl_vlm.types import Completion, GenerationRequest, InFlightUpdates, SampleChunk, UserInputError

VERSIONS, TOKENS = (1, 2, 3, 4), 30
CHANGES = (6, 7, 18)  # the steps after which new adapters come; the first token comes with the prompt
PIECES = ((7, 1), (1, 2), (11, 3), (11, 4))


@pytest.fixture(scope="module")
def models(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    place = tmp_path_factory.mktemp("adapters")
    return {version: model_of(tiny_folder, random_payload(tiny_folder, version), place) for version in VERSIONS}


def asked(folder: Path) -> list[GenerationRequest]:
    """Prompts of different lengths with one, two and no images; five samples together."""
    text, images = text_side(folder), pictures(np.random.default_rng(0), 3)
    sampling: dict[str, Any] = {"max_new_tokens": TOKENS, "temperature": 0.9, "ignore_eos": True}
    return [
        request(text, [images[0], "What is it?"], name="one", n=2, seeds=(1, 2), **sampling),
        request(text, [images[1], "And", images[2], "?"], name="two", n=2, seeds=(3, 4), **sampling),
        request(text, ["Nothing to see, only words. " * 3], name="none", seeds=(5,), **sampling),
    ]


@asynccontextmanager
async def changing_engine(folder: Path, mode: InFlightUpdates | None) -> AsyncIterator[TransformersEngine]:
    """An engine at the first version, which gets the others at the `CHANGES`."""
    engine = TransformersEngine(folder, max_context=MAX_CONTEXT, in_flight=mode)
    first, *later = (random_payload(folder, version) for version in VERSIONS)
    loop, step = asyncio.get_running_loop(), Decoder.step

    def step_and_load(self: Decoder) -> list[PreparedRequest]:  # on the engine's thread
        finished = step(self)
        if later and self.counts["steps"] == CHANGES[-len(later)]:
            asyncio.run_coroutine_threadsafe(engine.load_adapter(later.pop(0)), loop).result(timeout=60)
        return finished

    try:
        with patch.object(Decoder, "step", step_and_load):
            await engine.load_adapter(first)
            yield engine
    finally:
        await engine.close()


def sample(folder: Path, mode: InFlightUpdates | None) -> list[Completion]:
    async def run() -> list[Completion]:
        async with changing_engine(folder, mode) as engine:
            return await engine.generate(asked(folder))

    return asyncio.run(run())


@pytest.fixture(scope="module")
def kept(tiny_folder: Path) -> list[Completion]:
    return sample(tiny_folder, "keep")


@pytest.fixture(scope="module")
def recomputed(tiny_folder: Path) -> list[Completion]:
    return sample(tiny_folder, "recompute")


def test_recomputed_samples_are_as_likely_as_under_the_versions_that_they_name(
    recomputed: list[Completion], tiny_folder: Path, models: dict[int, Any]
) -> None:
    exact, with_kept_cache = distances(tiny_folder, models, asked(tiny_folder), recomputed)
    print(f"recompute: from a recomputation {exact}")
    assert exact.largest < 1e-4
    assert with_kept_cache.largest > 0.1  # the versions are far from each other


def test_kept_samples_are_those_of_a_cache_that_is_passed_on(
    kept: list[Completion], tiny_folder: Path, models: dict[int, Any]
) -> None:
    exact, with_kept_cache = distances(tiny_folder, models, asked(tiny_folder), kept)
    print(f"keep: from a recomputation {exact}; from transformers with a kept cache {with_kept_cache}")
    assert with_kept_cache.largest < 1e-4
    assert exact.largest > 0.1


def test_the_first_version_samples_what_it_does_without_updates(
    kept: list[Completion], recomputed: list[Completion], tiny_folder: Path
) -> None:
    plain = sample(tiny_folder, None)
    for answers in (kept, recomputed):
        for one, other in zip(plain, answers, strict=True):
            for whole, mixed in zip(one.samples, other.samples, strict=True):
                same = mixed.pieces[0][0]
                np.testing.assert_array_equal(whole.token_ids[:same], mixed.token_ids[:same])
    assert all(one.pieces == () for answer in plain for one in answer.samples)
    assert [answer.policy_version for answer in plain] == [VERSIONS[0]] * len(plain)


def test_a_stream_names_the_version_of_each_chunk(tiny_folder: Path) -> None:
    async def read() -> list[SampleChunk]:
        async with changing_engine(tiny_folder, "keep") as engine:
            return [chunk async for chunk in engine.stream(asked(tiny_folder)[0])]

    chunks = asyncio.run(read())
    for number in (0, 1):
        names = [chunk.policy_version for chunk in chunks if chunk.number == number for _ in chunk.token_ids]
        assert names == [version for count, version in PIECES for _ in range(count)]


def test_a_turn_keeps_the_version_of_every_token(kept: list[Completion], tiny_folder: Path) -> None:
    class Answers:
        async def generate(self, request: GenerationRequest) -> Completion:
            return kept[0]

    turns: list[SampledTurn] = asyncio.run(
        request_turns(Answers(), asked(tiny_folder)[0], kept[0].prompt_ids, "g", piece=None)
    )
    assert [turn.pieces for turn in turns] == [one.pieces for one in kept[0].samples]


def test_a_group_is_as_old_as_its_newest_token() -> None:
    assert RolloutSection(in_flight_updates="keep", max_policy_lag=1).crosses_versions
    assert not RolloutSection().crosses_versions


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "rollout.in_flight_updates has no effect without rollout.max_policy_lag"),
        ({"max_policy_lag": 1, "partial_tokens": 4}, "set one of them"),
    ],
)
def test_it_is_refused_where_it_makes_no_sense(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserInputError, match=message):
        parse_config({"rollout": {"in_flight_updates": "keep", **settings}})


@pytest.mark.parametrize("engine", ["TransformersEngine", "VLLMEngine"])
@pytest.mark.parametrize("mode", [None, "keep", "recompute"])
def test_the_switch_reaches_both_engines(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, engine: str, mode: str | None
) -> None:
    module = "transformers_engine" if engine == "TransformersEngine" else "vllm_engine"
    vllm: Any = lambda model, config, in_flight: {"in_flight": in_flight, "max_loras": config.lora_slots}  # noqa: E731
    made = vllm if engine == "VLLMEngine" else lambda model, **settings: settings
    monkeypatch.setattr(f"rl_vlm.engines.{module}.{engine}", made)
    settings: Any = build_engine(
        tiny_folder,
        parse_config(
            {
                "serving": {"engine": module.removesuffix("_engine")},
                "rollout": {"max_policy_lag": 2, "in_flight_updates": mode},
            }
        ),
    )
    assert settings["in_flight"] == mode
    if engine == "VLLMEngine":  # one slot, which is overwritten, or one for each version that may still be sampling
        assert settings["max_loras"] == (1 if mode else 4)
