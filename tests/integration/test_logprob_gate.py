"""Engine and learner agree in bfloat16 on a CPU, or the gate of `logprob_gate.py` closes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from logprob_gate import check_gate
from policy_loop import MAX_CONTEXT

from rl_vlm.config import ServingSection, VLLMSection
from rl_vlm.engines.transformers_engine import TransformersEngine


@pytest.mark.acceptance
def test_transformers_passes_the_gate(wide_folder: Path) -> None:
    check_gate(wide_folder, TransformersEngine(wide_folder, dtype="bfloat16", max_context=MAX_CONTEXT))


@pytest.mark.acceptance
def test_vllm_passes_the_gate(wide_folder: Path) -> None:
    from rl_vlm.engines.vllm_engine import VLLMEngine  # imports vLLM, which takes seconds

    serving = ServingSection(max_context=MAX_CONTEXT, vllm=VLLMSection(max_num_seqs=16))
    engine = VLLMEngine(wide_folder, dtype="bfloat16", serving=serving, max_lora_rank=16)
    try:
        check_gate(wide_folder, engine)
    finally:
        asyncio.run(engine.close())
