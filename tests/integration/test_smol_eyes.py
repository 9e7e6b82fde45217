"""smol-eyes, built from the published package: its words are the published ones, and both engines compute them."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from rl_vlm.zoo.smol_eyes.model import WORDS, build, download_gguf

pytestmark = [
    pytest.mark.acceptance,  # it downloads 93 MB
    pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="needs the package gguf"),
]
CHATS = (
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name a colour."},
        {"role": "assistant", "content": "Red."}, {"role": "user", "content": "Another one, and why?"},
    ],
)  # fmt: skip


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return download_gguf(tmp_path_factory.mktemp("package"))


@pytest.fixture(scope="module")
def folder(gguf: Path) -> Path:
    return build(gguf, gguf.parent / "model", seed=0)


@pytest.mark.parametrize("chat", CHATS)
def test_words_alone_are_answered_as_by_the_published_model(
    chat: list[dict[str, str]], gguf: Path, folder: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    published = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    for weight in published.parameters():
        weight.data = weight.data.bfloat16().float()  # as the folder stores them
    wanted = tokenizer(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)).input_ids
    processor = AutoProcessor.from_pretrained(folder)
    parts = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in chat]
    prompt = processor.apply_chat_template(parts, tokenize=False, add_generation_prompt=True)
    assert processor.tokenizer(prompt).input_ids == wanted
    ours = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([wanted])
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits[..., :WORDS], published(ids).logits, rtol=0, atol=1e-3)
    answers = [model.generate(ids, do_sample=False, max_new_tokens=24) for model in (ours, published)]
    assert torch.equal(*answers) and tokenizer.decode(answers[0][0, len(wanted) :])


@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_both_engines_compute_what_transformers_does(
    engine: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    bench = importlib.import_module("parity").Parity(folder, "float32", engine, "all")
    try:
        cells = bench.run()
        assert cells["ids"] and cells["greedy"] and max(cells["engine"], cells["learner"], cells["adapter"]) < 1e-3
        assert cells["a blank image changes"] > 0.01, cells
    finally:
        asyncio.run(bench.engine.close())
