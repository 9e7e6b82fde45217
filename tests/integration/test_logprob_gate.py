"""Engine and learner agree in bfloat16 on a CPU, or the gate of `logprob_gate.py` closes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from logprob_gate import check_gate
from policy_loop import MAX_CONTEXT

from rl_vlm.config import ServingSection, VLLMSection
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.models.loading import HeadDType


@pytest.mark.acceptance
@pytest.mark.parametrize("head", ["model", "float32"])
def test_transformers_passes_the_gate(wide_folder: Path, head: HeadDType) -> None:
    engine = TransformersEngine(wide_folder, dtype="bfloat16", max_context=MAX_CONTEXT, head_dtype=head)
    check_gate(wide_folder, engine, head)


@pytest.mark.acceptance
@pytest.mark.parametrize("head", ["model", "float32"])
def test_vllm_passes_the_gate(wide_folder: Path, head: HeadDType) -> None:
    from rl_vlm.engines.vllm_engine import VLLMEngine  # imports vLLM, which takes seconds

    serving = ServingSection(engine="vllm", max_context=MAX_CONTEXT, vllm=VLLMSection(max_num_seqs=16))
    engine = VLLMEngine(wide_folder, dtype="bfloat16", serving=serving, max_lora_rank=16, head_dtype=head)
    try:
        check_gate(wide_folder, engine, head)
    finally:
        asyncio.run(engine.close())
