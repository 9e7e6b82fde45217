"""vLLM and the learner agree on every log-probability, also after many updates."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from distillation_support import check_scores
from logprob_gate import check_gate
from policy_loop import MAX_CONTEXT, Loop, check_agreement
from segment_support import check_segments
from vllm_support import vllm_config

from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.engines.vllm_engine import VLLMEngine
from rl_vlm.models.modules import HeadDType

pytestmark = pytest.mark.acceptance  # CI compares log-probabilities in test_vllm_engine.py


@pytest.fixture(scope="module")
def folder(wide_folder: Path) -> Path:
    return wide_folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[VLLMEngine]:
    engine = VLLMEngine(folder, vllm_config(MAX_CONTEXT))
    yield engine
    asyncio.run(engine.close())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_engine_and_learner_agree_after_twenty_updates(engine: VLLMEngine, folder: Path, temperature: float) -> None:
    loop = Loop(folder, temperature, engine, learner__lr=1e-2)
    check_agreement(loop, updates=20)


def test_engine_and_learner_agree_within_a_format(engine: VLLMEngine, folder: Path) -> None:
    form = {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}}
    loop = Loop(folder, 0.7, engine, learner__lr=1e-2, rollout__format=form)
    for _ in range(5):
        stats = loop.update(loop.sample())
        assert stats["policy/first_ratio_error"] == 0.0
        assert stats.metrics()["mismatch/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("history", [{"images": 2}, {"turns": 2}])
def test_engine_and_learner_agree_on_every_segment(engine: VLLMEngine, folder: Path, history: dict[str, int]) -> None:
    check_segments(engine, folder, history)


def test_a_teacher_says_what_plain_transformers_says(engine: VLLMEngine, folder: Path) -> None:
    check_scores(folder, engine)


# --- Engine and learner agree in bfloat16 on a CPU, or the gate of `logprob_gate.py` closes


@pytest.mark.parametrize("head", ["model", "float32"])
def test_transformers_passes_the_gate(wide_folder: Path, head: HeadDType) -> None:
    engine = TransformersEngine(wide_folder, dtype="bfloat16", max_context=MAX_CONTEXT, head_dtype=head)
    check_gate(wide_folder, engine, head)


@pytest.mark.parametrize("head", ["model", "float32"])
def test_vllm_passes_the_gate(wide_folder: Path, head: HeadDType) -> None:
    from rl_vlm.engines.vllm_engine import VLLMEngine  # imports vLLM, which takes seconds

    engine = VLLMEngine(wide_folder, vllm_config(MAX_CONTEXT, dtype="bfloat16", head_dtype=head))
    try:
        check_gate(wide_folder, engine, head)
    finally:
        asyncio.run(engine.close())
