"""vLLM and the learner agree on every log-probability, also after many updates."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from policy_loop import MAX_CONTEXT, Loop, check_agreement

from rl_vlm.config import ServingSection, VLLMSection
from rl_vlm.engines.vllm_engine import VLLMEngine


@pytest.fixture(scope="module")
def folder(wide_folder: Path) -> Path:
    return wide_folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[VLLMEngine]:
    serving = ServingSection(engine="vllm", max_context=MAX_CONTEXT, vllm=VLLMSection(max_num_seqs=16))
    engine = VLLMEngine(folder, dtype="float32", serving=serving, max_lora_rank=16)
    yield engine
    asyncio.run(engine.close())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_engine_and_learner_agree_after_twenty_updates(engine: VLLMEngine, folder: Path, temperature: float) -> None:
    loop = Loop(folder, temperature, engine, learner__lr=1e-2)
    check_agreement(loop, updates=20)
