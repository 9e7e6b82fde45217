"""Penalties, min-p and least lengths: the transformers engine against transformers' own logits processors."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_support import plain_model, reference_logits, request
from http_support import tiny_engine
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.models.loading import TextSide
from rl_vlm.types import Completion, GenerationRequest, SamplingParams, StopReason, UserInputError

CASES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.5},
    "repetition below 1": {"repetition_penalty": 0.7},
    "frequency": {"frequency_penalty": 1.5},
    "presence": {"presence_penalty": -1.2},
    "min-p": {"min_p": 0.3},
    "min-p and top-p": {"min_p": 0.1, "top_p": 0.8},
    "all": {
        "repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.3, "min_p": 0.05, "top_k": 40,
        "min_tokens": 8,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Iterator[TransformersEngine]:
    with tiny_engine(tiny_folder) as engine:
        yield engine


reference_model = lru_cache(maxsize=1)(plain_model)


def expected_logprobs(folder: Path, text: TextSide, asked: GenerationRequest, answer: Completion, k: int) -> np.ndarray:
    """Of each sampled token, by a full forward pass and transformers' processors, one position after the other."""
    sampling, tokens = asked.sampling, answer.samples[k].token_ids
    ids = torch.from_numpy(np.concatenate([answer.prompt_ids, tokens]).astype(np.int64))
    with torch.no_grad():
        logits = reference_logits(folder, reference_model(folder), ids.numpy(), asked.images)[
            len(answer.prompt_ids) - 1 : -1
        ]
    logits[:, torch.from_numpy(text.codec.suppressed_token_ids(text.vocab_size))] = float("-inf")
    warpers = LogitsProcessorList()
    if sampling.temperature:
        warpers.append(TemperatureLogitsWarper(sampling.temperature))
        warpers += [MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
        warpers += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
        warpers += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    found = []
    for step, token in enumerate(tokens.tolist()):
        scores, context = logits[step : step + 1].clone(), ids[None, : len(answer.prompt_ids) + step]
        if step < sampling.min_tokens:
            scores[0, text.codec.end_of_turn_id] = float("-inf")
        if sampling.repetition_penalty != 1:
            scores = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(context, scores)
        for seen, count in Counter(tokens[:step].tolist()).items():  # OpenAI's formula; transformers has no processor
            scores[0, seen] -= count * sampling.frequency_penalty + sampling.presence_penalty
        found.append(torch.log_softmax(warpers(context, scores), dim=-1)[0, token].item())
    return np.array(found)


@pytest.mark.parametrize("temperature", [0.0, 1.3])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_log_probabilities_equal_transformers_processors(
    engine: TransformersEngine, text: TextSide, tiny_folder: Path, case: dict[str, Any], temperature: float
) -> None:
    """Beside requests without any of it, in the same batch."""
    asked = request(text, ["one one one two"], max_new_tokens=20, n=2, seeds=(1, 2), temperature=temperature, **case)
    plain = request(text, ["one"], name="plain", max_new_tokens=20, seeds=(3,))
    together, other = asyncio.run(engine.generate([asked, plain]))
    for k, sample in enumerate(together.samples):
        np.testing.assert_allclose(sample.logprobs, expected_logprobs(tiny_folder, text, asked, together, k), atol=2e-4)
    np.testing.assert_allclose(
        other.samples[0].logprobs, expected_logprobs(tiny_folder, text, plain, other, 0), atol=1e-4
    )


def test_no_end_and_no_stop_string_before_min_tokens(engine: TransformersEngine, text: TextSide) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 60, "n": 32, "seeds": tuple(range(32)), "temperature": 2.0}
    free = asyncio.run(engine.generate([request(text, ["x"], **settings)]))[0]
    assert min(len(sample.token_ids) for sample in free.samples) < 20
    least = asyncio.run(engine.generate([request(text, ["x"], min_tokens=20, **settings)]))[0]
    assert min(len(sample.token_ids) for sample in least.samples) >= 20
    stop = text.codec.decode(least.samples[0].token_ids[:1])
    stopped = asyncio.run(engine.generate([request(text, ["x"], min_tokens=20, stop=(stop,), **settings)]))[0]
    for sample in stopped.samples:
        assert len(sample.token_ids) > 20 or sample.stop_reason is not StopReason.STOP
    assert len(stopped.samples[0].token_ids) > 20


def test_a_stop_string_after_min_tokens_may_overlap_with_what_came_before(
    engine: TransformersEngine, text: TextSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    (newline,) = text.codec.encode_text("\n").tolist()
    only = torch.full_like(engine.backbone.token_bias, float("-inf"))
    only[newline] = 0.0
    monkeypatch.setattr(engine.backbone, "token_bias", only)
    asked = request(text, ["x"], max_new_tokens=12, temperature=0.0, stop=("\n\n",), min_tokens=2)
    (sample,) = asyncio.run(engine.generate([asked]))[0].samples
    assert (len(sample.token_ids), sample.stop_reason) == (3, StopReason.STOP)


def test_ignore_eos_goes_on_to_the_limit(engine: TransformersEngine, text: TextSide) -> None:
    asked = request(text, ["x"], max_new_tokens=50, n=16, temperature=1.0, ignore_eos=True)
    samples = asyncio.run(engine.generate([asked]))[0].samples
    assert {(len(sample.token_ids), sample.stop_reason) for sample in samples} == {(50, StopReason.LENGTH)}
    assert any(text.codec.end_of_turn_id in sample.token_ids for sample in samples)


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_p": 1.5}, {"min_tokens": 9}, {"repetition_penalty": 0.0}, {"frequency_penalty": 3.0},
        {"choices": ("a",), "ignore_eos": True}, {"choices": ("a",), "min_tokens": 1}, {"presence_penalty": float("nan")},
    ],
    ids=str,
)  # fmt: skip
def test_values_that_mean_nothing_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UserInputError):
        SamplingParams(8, **wrong)
