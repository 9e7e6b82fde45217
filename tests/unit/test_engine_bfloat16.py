"""The transformers engine in bfloat16 computes an adapter as the learner does, however small it is, and its head as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from core_support import adapted_policy, picture, request, text_side

from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.engines.weights import AdapterWeights, Factors
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.models.lora import language_linears
from rl_vlm.types import Completion

YOUNG = 0.004  # of LoRA's factors: their products are some 1/1000 of the weights


@pytest.fixture(scope="module")
def policy(tiny_folder: Path) -> PolicyModel:
    return adapted_policy(tiny_folder, scale=YOUNG, model__dtype="bfloat16")


@pytest.fixture
def engine(tiny_folder: Path) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(tiny_folder, dtype="bfloat16", max_context=512)
    yield engine
    asyncio.run(engine.close())


def test_layers_give_the_bits_of_the_learners_and_merged_ones_would_lose_the_adapter(
    engine: TransformersEngine, policy: PolicyModel
) -> None:
    version = policy.payload(1)
    beside = engine._weights.form(version)
    assert isinstance(beside, Factors)
    theirs = {
        name.replace(".base_layer", ""): layer
        for name, layer in policy.model.named_modules()
        if hasattr(layer, "lora_A")
    }
    engine._weights.use(beside)
    generator = torch.Generator().manual_seed(0)
    lost = []
    with torch.inference_mode():
        inputs = {
            name: torch.randn(5, layer.in_features, generator=generator).bfloat16()
            for name, layer in language_linears(engine.backbone.model).items()
        }
        ours = {name: language_linears(engine.backbone.model)[name](x) for name, x in inputs.items()}
        assert ours and all(torch.equal(ours[name], theirs[name](x)) for name, x in inputs.items())
        engine._weights.use(None)
        merged = AdapterWeights(engine.backbone.model)
        formed = merged.form(version)
        lost = [
            float((formed[name] == layer.weight).float().mean())
            for name, layer in language_linears(engine.backbone.model).items()
        ]
    assert min(lost) > 0.5  # of the weights, which an adapter that is added to them leaves as they were


def test_the_head_is_told(tiny_folder: Path) -> None:
    text = text_side(tiny_folder)
    asked = request(
        text, [picture(np.random.default_rng(0)), "What?"], temperature=0.0, max_new_tokens=6, top_logprobs=5
    )

    def answer(head: str) -> Completion:
        engine = TransformersEngine(tiny_folder, dtype="bfloat16", max_context=512, head_dtype=head)  # type: ignore[arg-type]
        try:
            return asyncio.run(engine.generate([asked]))[0]
        finally:
            asyncio.run(engine.close())

    rounded, wide = (
        np.array([value for place in answer(head).samples[0].top_logprobs for _, value in place]).reshape(-1, 5)
        for head in ("model", "float32")
    )

    # Differences within a position are those of logits: multiples of bfloat16's steps only where these are rounded.
    def on_grid(values: np.ndarray) -> float:
        gaps = np.abs(values[:, :1] - values) * 2**9
        return float(np.abs(gaps - np.round(gaps)).max())

    assert on_grid(rounded) < 0.02 < on_grid(wide)
