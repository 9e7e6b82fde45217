"""One vLLM engine for more policies than it has LoRA slots: every answer is of its policy's weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from vllm_support import TeacherForcing, ask, hostile_model, random_adapters, vllm_config

from rl_vlm.engines.base import BASE_MODEL, EngineError
from rl_vlm.engines.vllm_engine import VLLMEngine
from rl_vlm.models.images import TextSide
from rl_vlm.models.loading import load_text_side
from rl_vlm.models.weights import AdapterPayload
from rl_vlm.types import Completion, GenerationRequest

pytestmark = pytest.mark.timeout(600)

POLICIES, SLOTS = 5, 2
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model() -> Path:
    return hostile_model()


@pytest.fixture(scope="module")
def text(model: Path) -> TextSide:
    return load_text_side(model)


@pytest.fixture(scope="module")
def weights(model: Path) -> dict[int, AdapterPayload]:
    return random_adapters(model, 2 * POLICIES)


@pytest.fixture
def engine(model: Path) -> Iterator[VLLMEngine]:
    engine = VLLMEngine(model, vllm_config(512, slots=SLOTS, rank=8))
    yield engine
    asyncio.run(engine.close())


def payload(weights: dict[int, AdapterPayload], policy: int, version: int) -> AdapterPayload:
    return replace(weights[1 + policy + POLICIES * (version - 1)], version=version, policy=f"p{policy}")


@pytest.mark.acceptance
def test_more_policies_than_slots_never_mix(
    engine: VLLMEngine, model: Path, text: TextSide, weights: dict[int, AdapterPayload]
) -> None:
    def requests(version: int) -> list[GenerationRequest]:
        return [
            replace(
                ask(text, f"p{k}/{turn}", max_new_tokens=8, temperature=1.0, seeds=(turn,)),
                policy=f"p{k}", min_version=version,
            )
            for turn in range(3) for k in range(POLICIES)
        ]  # fmt: skip

    async def live() -> dict[int, list[Completion]]:
        said: dict[int, list[Completion]] = {}
        for version in (1, 2):
            await asyncio.gather(*(engine.load_adapter(payload(weights, k, version)) for k in range(POLICIES)))
            found = await asyncio.gather(*(engine.generate([one]) for one in requests(version)))
            said[version] = [answer for (answer,) in found]
        base = await engine.generate([replace(requests(1)[0], min_version=BASE_MODEL)])
        said[BASE_MODEL] = base
        # The name and the number come again with other weights.
        await engine.drop_policy("p0")
        with pytest.raises(EngineError, match="no version"):
            await engine.generate([requests(1)[0]])
        await engine.load_adapter(replace(payload(weights, 3, 2), policy="p0", version=1))
        said[0] = await engine.generate([requests(1)[0]])
        return said

    said = asyncio.run(live())
    for version in (1, 2):
        for one, answer in zip(requests(version), said[version], strict=True):
            assert (answer.policy, answer.policy_version) == (one.policy, version)
    checks = {(k, v): TeacherForcing(model, text, payload(weights, k, v)) for k in range(POLICIES) for v in (1, 2)}
    for version in (1, 2):
        for place, (one, answer) in enumerate(zip(requests(version), said[version], strict=True)):
            k = place % POLICIES
            assert distance(checks[k, version], one, answer) < TOLERANCE
            assert distance(checks[(k + 1) % POLICIES, version], one, answer) > 0.05
    assert distance(TeacherForcing(model, text), requests(1)[0], said[BASE_MODEL][0]) < TOLERANCE
    assert distance(checks[3, 2], requests(1)[0], said[0][0]) < TOLERANCE


def distance(forcing: TeacherForcing, asked: GenerationRequest, answer: Completion) -> float:
    """Of the answer's log-probabilities from plain transformers', at most."""
    return forcing.error([asked], [answer])
