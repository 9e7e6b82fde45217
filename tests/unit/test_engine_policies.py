"""One transformers engine for many policies: no answer comes from another policy's weights, and turns are fair."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_support import adapted_policy, gap, picture, plain_model, request
from engine_support import endless, language_linears, until
from version_support import model_of

from rl_vlm.engines.base import BASE_MODEL, EngineError
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.engines.weights import AdapterWeights, Factors
from rl_vlm.models.images import TextSide
from rl_vlm.models.weights import AdapterPayload
from rl_vlm.types import Completion, GenerationRequest, UserInputError

POLICIES = ("a", "b", "c")
PLENTY = 1 << 30


@pytest.fixture(scope="module")
def payloads(tiny_folder: Path) -> dict[tuple[str, int], AdapterPayload]:
    """Far from each other."""
    return {
        (name, version): dataclasses.replace(
            adapted_policy(tiny_folder, seed=10 * place + version).payload(version), policy=name
        )
        for place, name in enumerate(POLICIES)
        for version in (1, 2)
    }


def make(folder: Path, merged_bytes: int = PLENTY, **settings: Any) -> TransformersEngine:
    return TransformersEngine(folder, max_context=512, merged_bytes=merged_bytes, **settings)


@pytest.fixture
def engine(tiny_folder: Path) -> Iterator[TransformersEngine]:
    engine = make(tiny_folder)
    yield engine
    asyncio.run(engine.close())


def ask(text: TextSide, policy: str, name: str = "r", **sampling: Any) -> GenerationRequest:
    shown = [picture(np.random.default_rng(3)), "Which?"]
    wanted = {"temperature": 1.0, "max_new_tokens": 6, **sampling}
    return dataclasses.replace(request(text, shown, name=name, **wanted), policy=policy)


def size_of_sum(engine: TransformersEngine) -> int:
    """Bytes of the language model's linear weights, which the adapters here change."""
    return sum(linear.weight.nbytes for linear in language_linears(engine.backbone.model).values())


@pytest.mark.parametrize("room", [PLENTY, 0, 1.5], ids=["merged", "beside", "some of both"])
def test_each_policy_answers_with_its_own_weights(
    tiny_folder: Path, text: TextSide, payloads: dict[tuple[str, int], AdapterPayload], tmp_path: Path, room: float
) -> None:
    engine = make(tiny_folder)
    engine._weights = AdapterWeights(engine.backbone.model, int(min(room * size_of_sum(engine), PLENTY)))
    asked = [
        ask(text, name, f"{name}{k}", n=2, seeds=(k, k + 50), min_version=1) for k in range(4) for name in POLICIES
    ]
    asked += [dataclasses.replace(ask(text, name, f"base {name}"), min_version=BASE_MODEL) for name in POLICIES]

    async def live() -> list[Completion]:
        for name in POLICIES:
            await engine.load_adapter(payloads[name, 1])
        found = await asyncio.gather(*(engine.generate([one]) for one in asked))
        await engine.close()
        return [answer for (answer,) in found]

    answers = asyncio.run(live())
    beside = [isinstance(version.formed, Factors) for version in engine._newest.values()]
    assert sum(beside) == {PLENTY: 0, 0: 3, 1.5: 2}[room]
    models = {name: model_of(tiny_folder, payloads[name, 1], tmp_path / name) for name in POLICIES}
    for one, answer in zip(asked, answers, strict=True):
        assert (answer.policy, answer.policy_version) == (one.policy, one.min_version)
        model = plain_model(tiny_folder) if one.min_version == BASE_MODEL else models[one.policy]
        assert gap(tiny_folder, model, one, answer) < 1e-4
    assert gap(tiny_folder, models["b"], asked[0], answers[0]) > 0.1  # which tells policies apart


def test_a_modest_policy_is_answered_beside_a_greedy_one(engine: TransformersEngine, text: TextSide) -> None:
    """Samples that would run for ever fill a policy's rows; another policy's call ends, and they go on."""
    endless_one = [ask(text, "greedy", f"g{k}", n=64, max_new_tokens=400) for k in range(12)]  # more than `max_rows`
    modest = [ask(text, "modest", f"m{k}", max_new_tokens=3) for k in range(4)]

    async def live() -> None:
        greedy = asyncio.ensure_future(engine.generate(endless_one))
        await until(lambda: engine.stats().running >= 448)
        answers = await asyncio.wait_for(engine.generate(modest), 60)
        assert {answer.policy for answer in answers} == {"modest"}
        assert not greedy.done() and engine.stats().running >= 448
        before = engine.stats().generated_tokens
        await until(lambda: engine.stats().generated_tokens > before)
        greedy.cancel()
        await until(lambda: engine.stats().running == 0)

    with endless(engine, text):
        asyncio.run(live())


def test_a_dropped_policy_is_refused_and_its_name_comes_again_with_other_weights(
    tiny_folder: Path,
    engine: TransformersEngine,
    text: TextSide,
    payloads: dict[tuple[str, int], AdapterPayload],
    tmp_path: Path,
) -> None:
    asked = ask(text, "a", max_new_tokens=5, min_version=1)
    other = dataclasses.replace(payloads["b", 1], policy="a")

    async def live() -> Completion:
        await engine.load_adapter(payloads["a", 1])
        await engine.generate([asked])
        await engine.drop_policy("a")
        with pytest.raises(EngineError, match="version 1"):
            await engine.generate([asked])
        await engine.load_adapter(other)
        return (await engine.generate([asked]))[0]

    answer = asyncio.run(live())
    assert gap(tiny_folder, model_of(tiny_folder, other, tmp_path), asked, answer) < 1e-4


def test_memory_for_merged_weights_is_bounded_and_given_back(
    engine: TransformersEngine, payloads: dict[tuple[str, int], AdapterPayload]
) -> None:
    weights = AdapterWeights(engine.backbone.model, max_merged_bytes=int(1.5 * size_of_sum(engine)))
    first = weights.form(payloads["a", 1])
    second = weights.form(payloads["b", 1])
    assert not isinstance(first, Factors) and isinstance(second, Factors)
    del second
    assert isinstance(weights.form(payloads["c", 1]), Factors)
    del first
    with pytest.raises(UserInputError):
        weights.form(dataclasses.replace(payloads["b", 1], config_json="{}"))  # takes no room
    assert not isinstance(weights.form(payloads["b", 1]), Factors)
