"""What the tests of the vLLM engine share: a hostile tiny model, requests, and teacher forcing by plain transformers."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from rl_vlm.config import PolicyConfig, parse_config
from rl_vlm.models.images import TextSide
from rl_vlm.models.loading import load_model, load_text_side
from rl_vlm.models.lora import inject_lora, load_lora_state, lora_config, lora_state
from rl_vlm.models.weights import AdapterPayload
from rl_vlm.types import Completion, EncodedImage, GenerationRequest, Message, SampleChunk, SamplingParams, StopReason
from rl_vlm.zoo.tiny import model as tiny
from rl_vlm.zoo.tiny import teach as tiny_teach
from rl_vlm.zoo.tiny import tokenizer as tiny_tokenizer


def hostile_model() -> Path:
    """A tiny model in which `<|image_pad|>` has by far the largest logit, whatever the context."""
    sources = [inspect.getsource(maker) for maker in (tiny, tiny_tokenizer, tiny_teach, _make_hostile)]
    key = hashlib.sha256("".join(sources).encode()).hexdigest()[:12]
    # Kept between runs: building it takes longer than most tests here.
    folder = Path(tempfile.gettempdir()) / f"rl-vlm-tests-{os.getuid()}" / f"tiny-hostile-{key}"
    if not folder.is_dir():
        draft = tiny.make_tiny(folder.with_name(f"draft-{time.time_ns()}"), variant="wide", steps=5)
        _make_hostile(draft)
        draft.rename(folder)
    return folder


def _make_hostile(folder: Path) -> None:
    """Point the placeholder's row of the tied output matrix along the mean hidden state, many times its length."""
    text, hf = load_text_side(folder), load_model(folder)
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (8, 64)))
    hidden = hf.model(input_ids=ids).last_hidden_state.flatten(0, 1)  # type: ignore[operator]
    weights = load_file(folder / "model.safetensors")
    mean = hidden.mean(0)
    weights["model.language_model.embed_tokens.weight"][text.codec.image_token_id] = 40 * mean / mean.norm() ** 2
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def random_adapters(model: Path, count: int) -> dict[int, AdapterPayload]:
    """Versions 1 to `count` of an adapter with random weights in A and B."""
    hf = load_model(model)
    config = lora_config(rank=4, alpha=16, target_modules="all")
    inject_lora(hf, config)
    payloads = {}
    for version in range(1, count + 1):
        generator = torch.Generator().manual_seed(version)
        for name, parameter in hf.named_parameters():
            if "lora_" in name:
                parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
        payloads[version] = AdapterPayload.build(version, lora_state(hf), config)
    return payloads


class TeacherForcing:
    """Log-probabilities of sampled tokens by plain transformers, with peft's own LoRA layers and HF's processor."""

    def __init__(self, model: Path, text: TextSide, payload: AdapterPayload | None = None) -> None:
        from transformers import AutoProcessor

        self._model: Any = load_model(model)
        self._processor = AutoProcessor.from_pretrained(model).image_processor
        self._size = {"shortest_edge": text.images.min_pixels, "longest_edge": text.images.max_pixels}
        self._text = text
        if payload is not None:
            inject_lora(self._model, lora_config(rank=4, alpha=16, target_modules="all"))
            load_lora_state(self._model, payload.state())

    @torch.no_grad()
    def logits(self, request: GenerationRequest, completion: Completion, sample: int) -> torch.Tensor:
        """Raw logits [T, V] that the tokens of one sample were drawn from."""
        tokens = completion.samples[sample].token_ids
        ids = torch.from_numpy(np.concatenate([completion.prompt_ids, tokens]).astype(np.int64))[None]
        extra = {"mm_token_type_ids": (ids == self._text.codec.image_token_id).int()}
        if request.images:
            extra |= self._processor(
                images=[image.to_pil() for image in request.images], size=self._size, return_tensors="pt"
            )
        logits = self._model(input_ids=ids, **extra).logits[0]
        return logits[len(completion.prompt_ids) - 1 : -1]

    def logprobs(self, request: GenerationRequest, completion: Completion, sample: int) -> np.ndarray:
        logits = self.logits(request, completion, sample)
        logits[:, torch.from_numpy(self._text.codec.suppressed_token_ids(self._text.vocab_size))] = float("-inf")
        temperature = request.sampling.temperature or 1.0
        tokens = torch.from_numpy(completion.samples[sample].token_ids.astype(np.int64))
        return torch.log_softmax(logits / temperature, -1).gather(1, tokens[:, None])[:, 0].numpy()

    def error(self, requests: Sequence[GenerationRequest], completions: Sequence[Completion]) -> float:
        """The largest difference over all tokens of all samples."""
        return max(
            float(np.abs(sample.logprobs - self.logprobs(request, completion, number)).max())
            for request, completion in zip(requests, completions, strict=True)
            for number, sample in enumerate(completion.samples)
        )


def picture(seed: int, width: int = 96, height: int = 64) -> EncodedImage:
    noise = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return EncodedImage.from_pil(Image.fromarray(noise))


def ask(text: TextSide, name: str, *images: EncodedImage, **sampling: Any) -> GenerationRequest:
    span = text.codec.encode_prompt([Message.of("user", *images, f"What is in the picture, {name}?")])
    params = SamplingParams(**{"max_new_tokens": 24, **sampling})
    return GenerationRequest(name, span.token_ids, params, span.images)


def generate(engine: Any, *requests: GenerationRequest) -> list[Completion]:
    return asyncio.run(engine.generate(list(requests)))


async def read_stream(engine: Any, request: GenerationRequest) -> list[SampleChunk]:
    """All chunks of a stream."""
    async with asyncio.timeout(60):
        return [chunk async for chunk in engine.stream(request)]


def converse(engine: Any, text: TextSide, name: str, *images: EncodedImage, **sampling: Any) -> list[tuple[Any, Any]]:
    """Three turns, the images in the first one and another one in the second; returns (request, completion) pairs."""
    request = ask(text, name, *images, **sampling)
    turns = []
    for turn in range(3):
        (completion,) = generate(engine, request)
        turns.append((request, completion))
        sample = completion.samples[0]
        parts = (picture(70, 64, 128), "And here?") if turn == 0 else ("Sure?",)
        ended = sample.stop_reason is StopReason.END_OF_TURN
        span = text.codec.encode_continuation([Message.of("user", *parts)], ended)
        ids = np.concatenate([request.prompt_ids, sample.token_ids, span.token_ids])
        request = replace(request, prompt_ids=ids, images=request.images + span.images)
    return turns


def request_like(completion: Completion, request: GenerationRequest, temperature: float) -> GenerationRequest:
    """The request as teacher forcing wants it, for a completion at another temperature."""
    return replace(request, sampling=SamplingParams(1, temperature=temperature, n=len(completion.samples)))


def vllm_config(max_context: int, *, slots: int = 2, rank: int = 16, **more: Any) -> PolicyConfig:
    """A run that vLLM serves, with room for `slots` adapters of this rank; `more` changes its model section."""
    return parse_config(
        {
            "serving": {"engine": "vllm", "max_context": max_context, "vllm": {"max_num_seqs": 16}},
            "rollout": {"max_policy_lag": slots - 2, "max_new_tokens": 64},
            "model": {"lora": {"rank": rank}, **more},
        }
    )
