"""One transformers engine for many policies: no answer comes from another policy's weights, and turns are fair."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_support import adapted_policy, picture, reference_logprobs, request, text_side
from version_support import model_of

from rl_vlm.engines.base import BASE_MODEL
from rl_vlm.engines.many_policies import ManyPoliciesEngine
from rl_vlm.models.adapter import AdapterPayload
from rl_vlm.models.loading import TextSide
from rl_vlm.types import Completion, GenerationRequest

POLICIES = ("a", "b", "c")
PLENTY = 1 << 30


@pytest.fixture(scope="module")
def text(tiny_folder: Path) -> TextSide:
    return text_side(tiny_folder)


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


def make(folder: Path, merged_bytes: int = PLENTY, **settings: Any) -> ManyPoliciesEngine:
    return ManyPoliciesEngine(folder, max_context=512, merged_bytes=merged_bytes, **settings)


@pytest.fixture
def engine(tiny_folder: Path) -> Iterator[ManyPoliciesEngine]:
    engine = make(tiny_folder)
    yield engine
    asyncio.run(engine.close())


def ask(text: TextSide, policy: str, name: str = "r", **sampling: Any) -> GenerationRequest:
    shown = [picture(np.random.default_rng(3)), "Which?"]
    wanted = {"temperature": 1.0, "max_new_tokens": 6, **sampling}
    return dataclasses.replace(request(text, shown, name=name, **wanted), policy=policy)


def distance(
    folder: Path, payload: AdapterPayload | None, asked: GenerationRequest, answer: Completion, place: Path
) -> float:
    """Of the answer's log-probabilities from transformers' and peft's, at most."""
    from core_support import plain_model

    model = plain_model(folder) if payload is None else model_of(folder, payload, place / payload.policy)
    worst = 0.0
    with torch.no_grad():
        for sample in answer.samples:
            ids = np.concatenate([answer.prompt_ids, sample.token_ids])
            found = reference_logprobs(folder, model, ids, asked.images, asked.sampling.temperature).numpy()
            worst = max(worst, float(np.abs(found[len(answer.prompt_ids) - 1 :] - sample.logprobs).max()))
    return worst


@pytest.mark.parametrize("merged_bytes", [PLENTY, 0, 2_000_000], ids=["merged", "beside", "some of both"])
def test_each_policy_answers_with_its_own_weights(
    tiny_folder: Path,
    text: TextSide,
    payloads: dict[tuple[str, int], AdapterPayload],
    tmp_path: Path,
    merged_bytes: int,
) -> None:
    engine = make(tiny_folder, merged_bytes, quantum=64)
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
    for one, answer in zip(asked, answers, strict=True):
        payload = None if one.min_version == BASE_MODEL else payloads[one.policy, 1]
        assert (answer.policy, answer.policy_version) == (one.policy, one.min_version)
        assert distance(tiny_folder, payload, one, answer, tmp_path) < 1e-4
    other = distance(tiny_folder, payloads["b", 1], asked[0], answers[0], tmp_path)
    assert other > 0.1  # the check above can tell policies apart
