"""Plain transformers, what `--compare-hf` compares with, chooses the engine's tokens: same prompts, same decoding, adapter and padding."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from core_support import text_side
from safetensors.torch import load, save

from rl_vlm.config import parse_config
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.evaluation.heldout import ItemPrompts
from rl_vlm.evaluation.plain_generate import PlainGenerate
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.models.weights import AdapterPayload
from rl_vlm.types import GenerationRequest, Message, SamplingParams

NEW_TOKENS = 12


@pytest.mark.parametrize("adapted", [False, True])
def test_plain_generate_chooses_the_engines_tokens(adapted: bool, tiny_folder: Path, tmp_path: Path) -> None:
    run = parse_config({"model": {"path": str(tiny_folder)}, "env": {"id": "Shapes-v0"}})
    payload = PolicyModel(tiny_folder, run).payload(1)
    torch.manual_seed(0)
    noisy = save({name: tensor.normal_(0.0, 0.2) for name, tensor in load(bytes(payload.tensors)).items()})
    folder = AdapterPayload(1, noisy, payload.config_json, "").write(tmp_path / "adapter")
    # Of different lengths, so that a batch is padded; the last has no picture.
    conversations = ItemPrompts(run).take([0, 1])
    conversations.append((*conversations[0], Message.of("assistant", "3"), Message.of("user", "Really? Look again.")))
    conversations.append((Message.of("user", "How are you?"),))
    theirs = PlainGenerate(run, str(folder) if adapted else None, NEW_TOKENS).answer(conversations)

    async def ask() -> list[list[int]]:
        engine, codec = TransformersEngine(tiny_folder, max_context=512), text_side(tiny_folder).codec
        if adapted:
            await engine.load_adapter(AdapterPayload.read(folder, 1))
        sampling = SamplingParams(NEW_TOKENS, temperature=0.0, ignore_eos=True)
        spans = [codec.encode_prompt(messages) for messages in conversations]
        requests = [GenerationRequest(f"r{k}", span.token_ids, sampling, span.images) for k, span in enumerate(spans)]
        answers = await engine.generate(requests)
        await engine.close()
        return [[int(token) for token in answer.samples[0].token_ids] for answer in answers]

    ours = asyncio.run(ask())
    assert ours == theirs and {len(tokens) for tokens in theirs} == {NEW_TOKENS}
