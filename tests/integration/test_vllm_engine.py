"""The vLLM engine against transformers, on a tiny model whose logits favour the image placeholder."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import inspect
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from rl_vlm.chat import expand_image_tokens
from rl_vlm.config import ServingSection, VLLMSection
from rl_vlm.engines.base import BASE_MODEL, EngineError
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.engines.vllm_adapters import AdapterShelf
from rl_vlm.engines.vllm_engine import VLLMEngine
from rl_vlm.models import tiny, tiny_tokenizer, tiny_warmstart
from rl_vlm.models.adapter import AdapterPayload
from rl_vlm.models.loading import TextSide, load_model, load_text_side
from rl_vlm.models.lora import inject_lora, load_lora_state, lora_config, lora_state
from rl_vlm.types import (
    Completion,
    EncodedImage,
    GenerationRequest,
    Message,
    SamplingParams,
    StopReason,
    UserInputError,
)

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
pytestmark = [needs_vllm, pytest.mark.timeout(600)]

SERVING = ServingSection(max_context=1024, vllm=VLLMSection(max_num_seqs=32))
TOLERANCE = 1e-4

# An owner that is killed; the test file's own process must survive.
OWNER = """
import sys, time
from pathlib import Path
from rl_vlm.config import ServingSection
from rl_vlm.engines.vllm_engine import VLLMEngine
if __name__ == "__main__":
    engine = VLLMEngine(Path(sys.argv[1]), dtype="float32", serving=ServingSection(max_context=256), max_lora_rank=8)
    print(engine._shelf._root, flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="session")
def model() -> Path:
    """A tiny model in which `<|image_pad|>` has by far the largest logit, whatever the context."""
    sources = [inspect.getsource(maker) for maker in (tiny, tiny_tokenizer, tiny_warmstart, _make_hostile)]
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


@pytest.fixture(scope="session")
def text(model: Path) -> TextSide:
    return load_text_side(model)


@pytest.fixture(scope="module")
def owner(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """Another process with an engine, which starts while the other tests run."""
    script = tmp_path_factory.mktemp("owner") / "owner.py"
    script.write_text(OWNER)
    process = subprocess.Popen([sys.executable, str(script), str(model)], stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def engine(model: Path, owner: subprocess.Popen[str]) -> Iterator[VLLMEngine]:
    del owner  # only started
    engine = VLLMEngine(model, dtype="float32", serving=SERVING, max_lora_rank=8)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture(scope="module")
def adapters(model: Path) -> dict[int, AdapterPayload]:
    """Versions 1 to 6 of an adapter with random weights in A and B."""
    hf = load_model(model)
    config = lora_config(rank=4, alpha=16, target_modules="all")
    inject_lora(hf, config)
    payloads = {}
    for version in range(1, 7):
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
            extra |= self._processor(images=[image.to_pil() for image in request.images], return_tensors="pt")
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


@pytest.fixture(scope="module")
def base_forcing(model: Path, text: TextSide) -> TeacherForcing:
    return TeacherForcing(model, text)


def picture(seed: int, width: int = 96, height: int = 64) -> EncodedImage:
    noise = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return EncodedImage.from_pil(Image.fromarray(noise))


def ask(text: TextSide, name: str, *images: EncodedImage, **sampling: Any) -> GenerationRequest:
    span = text.codec.encode_prompt([Message.of("user", *images, f"What is in the picture, {name}?")])
    params = SamplingParams(**{"max_new_tokens": 24, **sampling})
    return GenerationRequest(name, span.token_ids, params, span.images)


def generate(engine: Any, *requests: GenerationRequest) -> list[Completion]:
    return asyncio.run(engine.generate(list(requests)))


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


def test_greedy_tokens_equal_the_transformers_engine(engine: VLLMEngine, model: Path, text: TextSide) -> None:
    other = TransformersEngine(model, max_context=SERVING.max_context)
    requests = [
        ask(text, "none", temperature=0.0),
        ask(text, "one", picture(1), temperature=0.0),
        ask(text, "two", picture(2), picture(3, 128, 32), temperature=0.0),
    ]
    ours, theirs = generate(engine, *requests), generate(other, *requests)
    asyncio.run(other.close())
    for one, two in zip(ours, theirs, strict=True):
        assert one.request_id == two.request_id and one.policy_version == two.policy_version == 0
        np.testing.assert_array_equal(one.prompt_ids, two.prompt_ids)
        np.testing.assert_array_equal(one.samples[0].token_ids, two.samples[0].token_ids)
        assert one.prompt_ids.dtype == one.samples[0].token_ids.dtype == np.int32
        np.testing.assert_allclose(one.samples[0].logprobs, two.samples[0].logprobs, atol=TOLERANCE)
        assert one.samples[0].stop_reason is two.samples[0].stop_reason


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_base_logprobs_equal_teacher_forcing_over_three_turns(
    engine: VLLMEngine, text: TextSide, base_forcing: TeacherForcing, temperature: float
) -> None:
    for images in ([picture(4)], [picture(5), picture(6, 32, 96)]):
        turns = converse(engine, text, f"base-{len(images)}", *images, temperature=temperature, n=2, seeds=(7, 8))
        assert [len(request.images) for request, _ in turns] == [len(images), len(images) + 1, len(images) + 1]
        error = base_forcing.error(*zip(*turns, strict=True))
        print(f"base, T={temperature}, {len(images)} images: largest difference {error:.1e}")
        assert error < TOLERANCE


def test_the_mask_holds_against_a_policy_that_wants_the_placeholder(
    engine: VLLMEngine, text: TextSide, base_forcing: TeacherForcing
) -> None:
    forbidden = text.codec.suppressed_token_ids(text.vocab_size)
    for temperature in (0.0, 1.0, 2.0):
        n = 1 if temperature == 0 else 4
        request = ask(text, "hostile", picture(7), temperature=temperature, n=n)
        (completion,) = generate(engine, request)
        for number, sample in enumerate(completion.samples):
            wanted = base_forcing.logits(request, completion, number).argmax(-1)
            assert (wanted == text.codec.image_token_id).float().mean() > 0.9, "the model is not hostile"
            assert not np.isin(sample.token_ids, forbidden).any()


def test_top_k_and_top_p_logprobs_are_those_of_the_restricted_distribution(
    engine: VLLMEngine, text: TextSide, base_forcing: TeacherForcing
) -> None:
    request = ask(text, "restricted", top_k=3, n=2, seeds=(1, 2))
    (completion,) = generate(engine, request)
    for number, sample in enumerate(completion.samples):
        logits = base_forcing.logits(request, completion, number)
        logits[:, torch.from_numpy(text.codec.suppressed_token_ids(text.vocab_size))] = float("-inf")
        top = logits.topk(3, -1)
        for row, token in enumerate(sample.token_ids):
            place = top.indices[row].tolist().index(int(token))
            assert sample.logprobs[row] == pytest.approx(float(top.values[row].log_softmax(-1)[place]), abs=TOLERANCE)
    # A nucleus smaller than the most likely token's mass leaves that token alone, with probability one.
    (nucleus,) = generate(engine, ask(text, "nucleus", top_p=1e-6))
    assert np.all(nucleus.samples[0].logprobs == 0)


def test_seeds_make_each_sample_reproducible_whatever_else_runs(engine: VLLMEngine, text: TextSide) -> None:
    request = ask(text, "seeded", picture(8), n=4, seeds=(11, 12, 2**63 + 5, 11))
    (first,) = generate(engine, request)
    others = [ask(text, f"other-{k}", picture(k), n=3) for k in range(4)]
    second = generate(engine, *others[:2], request, *others[2:])[2]
    for one, two in zip(first.samples, second.samples, strict=True):
        np.testing.assert_array_equal(one.token_ids, two.token_ids)
    np.testing.assert_array_equal(first.samples[0].token_ids, first.samples[3].token_ids)
    assert not np.array_equal(first.samples[0].token_ids, first.samples[1].token_ids)
    reordered = replace(request, sampling=replace(request.sampling, seeds=(12, 11, 1, 2)))
    (third,) = generate(engine, reordered)
    np.testing.assert_array_equal(third.samples[0].token_ids, first.samples[1].token_ids)


def test_samples_without_seeds_differ(engine: VLLMEngine, text: TextSide) -> None:
    request = ask(text, "unseeded", n=4)
    drawn = {
        tuple(sample.token_ids) for completion in generate(engine, request, request) for sample in completion.samples
    }
    assert len(drawn) == 8


def test_a_turn_ends_with_its_end_token_a_stop_string_or_its_limit(engine: VLLMEngine, text: TextSide) -> None:
    (ends,) = generate(engine, ask(text, "ends", temperature=2.0, n=24, max_new_tokens=128, seeds=tuple(range(24))))
    reasons = {sample.stop_reason for sample in ends.samples}
    assert reasons == {StopReason.END_OF_TURN, StopReason.LENGTH}
    for sample in ends.samples:
        inside, last = sample.token_ids[:-1], sample.token_ids[-1]
        assert text.codec.end_of_turn_id not in inside
        assert (last == text.codec.end_of_turn_id) == (sample.stop_reason is StopReason.END_OF_TURN)
        assert sample.stop_reason is StopReason.END_OF_TURN or len(sample.token_ids) == 128

    request = ask(text, "stops", seeds=(5,), max_new_tokens=40)
    (free,) = generate(engine, request)
    words = [text.codec.decode(free.samples[0].token_ids[: k + 1]) for k in range(40)]
    stop = words[20][-3:]
    first = next(k for k, seen in enumerate(words) if stop in seen)
    (stopped,) = generate(engine, replace(request, sampling=replace(request.sampling, stop=("never ever", stop))))
    assert stopped.samples[0].stop_reason is StopReason.STOP
    np.testing.assert_array_equal(stopped.samples[0].token_ids, free.samples[0].token_ids[: first + 1])
    np.testing.assert_allclose(stopped.samples[0].logprobs, free.samples[0].logprobs[: first + 1], atol=TOLERANCE)


def test_what_cannot_be_sampled_is_named_and_leaves_the_engine_working(
    engine: VLLMEngine, text: TextSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = ask(text, "good", picture(9), max_new_tokens=4)
    bad = {
        "exceed the context": replace(good, sampling=SamplingParams(max_new_tokens=1020)),
        "placeholders for 2 images": replace(good, images=good.images * 2),
        "temperature 0 or from": replace(good, sampling=SamplingParams(4, temperature=2.5)),
    }
    for message, request in bad.items():
        with pytest.raises(EngineError, match=f"(?s)Request bad.*{message}"):
            generate(engine, good, replace(request, request_id="bad"))
    with monkeypatch.context() as patch:
        patch.setattr(TextSide, "count_image_tokens", lambda self, width, height: 5)
        with pytest.raises(EngineError, match=r"Request good: vLLM expanded the prompt .* grids"):
            generate(engine, good)
    (completion,) = generate(engine, good)
    counts = [text.count_image_tokens(96, 64)]
    expected = expand_image_tokens(good.prompt_ids, text.codec.image_token_id, counts)
    np.testing.assert_array_equal(completion.prompt_ids, expected)
    assert generate(engine) == []


def test_cancelling_a_call_aborts_its_requests(engine: VLLMEngine, text: TextSide) -> None:
    async def cancel() -> int:
        call = asyncio.create_task(engine.generate([ask(text, "long", n=8, temperature=0.5, max_new_tokens=900)]))
        while engine._llm.get_num_unfinished_requests() < 8:
            await asyncio.sleep(0.01)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        for _ in range(100):
            if not engine._llm.get_num_unfinished_requests():
                break
            await asyncio.sleep(0.02)
        return int(engine._llm.get_num_unfinished_requests())

    assert asyncio.run(cancel()) == 0


def test_adapters_swap_without_mixing_versions(
    engine: VLLMEngine, model: Path, text: TextSide, adapters: dict[int, AdapterPayload], base_forcing: TeacherForcing
) -> None:
    forcing = {version: TeacherForcing(model, text, adapters[version]) for version in (1, 2)}
    request = ask(text, "swap", picture(10), temperature=0.7, seeds=(3,))
    base = replace(request, min_version=BASE_MODEL)
    (before,) = generate(engine, request)
    assert before.policy_version == engine.version == 0

    asyncio.run(engine.load_adapter(adapters[1]))
    asyncio.run(engine.load_adapter(adapters[1]))  # again: the same version stays the same version
    (first,) = generate(engine, request)
    assert first.policy_version == engine.version == 1
    turns = converse(engine, text, "adapted", picture(11), picture(12), temperature=0.7, n=2, seeds=(1, 2))
    error = forcing[1].error(*zip(*turns, strict=True))
    print(f"adapter 1, T=0.7, 2 images: largest difference {error:.1e}")
    assert error < TOLERANCE

    async def swap_in_flight() -> tuple[Completion, Completion]:
        long = replace(request, sampling=SamplingParams(400, n=8, temperature=1.0))
        running = asyncio.create_task(engine.generate([long]))
        while engine._llm.get_num_unfinished_requests() < 8:
            await asyncio.sleep(0.01)
        await engine.load_adapter(adapters[2])
        assert not running.done()
        (after,) = await engine.generate([request])
        (old,) = await running
        return old, after

    old, second = asyncio.run(swap_in_flight())
    assert (old.policy_version, second.policy_version, engine.version) == (1, 2, 2)
    assert forcing[1].error([request_like(old, request, 1.0)], [old]) < TOLERANCE
    assert forcing[2].error([request], [second]) < TOLERANCE
    # The versions are far apart, so the agreement above says something.
    assert forcing[2].error([request], [first]) > 0.1 and base_forcing.error([request], [first]) > 0.1

    (plain,) = generate(engine, base)
    assert plain.policy_version == BASE_MODEL
    np.testing.assert_array_equal(plain.samples[0].token_ids, before.samples[0].token_ids)
    mixed = generate(engine, base, request)
    assert [completion.policy_version for completion in mixed] == [BASE_MODEL, 2]
    turns = converse(engine, text, "adapted-1", picture(13), temperature=1.0, n=1, seeds=(4,))
    error = forcing[2].error(*zip(*turns, strict=True))
    print(f"adapter 2, T=1, 1 image: largest difference {error:.1e}")
    assert error < TOLERANCE


def request_like(completion: Completion, request: GenerationRequest, temperature: float) -> GenerationRequest:
    """The request as teacher forcing wants it, for a completion at another temperature."""
    return replace(request, sampling=SamplingParams(1, temperature=temperature, n=len(completion.samples)))


def test_unfit_adapters_are_refused_and_the_engine_keeps_its_version(
    engine: VLLMEngine, model: Path, text: TextSide, adapters: dict[int, AdapterPayload]
) -> None:
    asyncio.run(engine.load_adapter(adapters[3]))
    hf = load_model(model)
    config = lora_config(rank=12, alpha=12, target_modules="attn")
    too_high = AdapterPayload.build(4, lora_state(inject_lora(hf, config)), config)
    visual = {name.replace("language_model.layers", "visual.blocks"): t for name, t in adapters[3].state().items()}
    unfit = {
        "rank": too_high,
        "only the language model": AdapterPayload.build(4, visual, lora_config(4, 16, "all")),
        "loaded with other weights": replace(adapters[4], version=3),
    }
    for message, payload in unfit.items():
        with pytest.raises(EngineError, match=message):
            asyncio.run(engine.load_adapter(payload))
    with pytest.raises(UserInputError, match="corrupt"):
        asyncio.run(engine.load_adapter(replace(adapters[4], sha256="0" * 64)))
    assert engine.version == 3 and not engine.dead
    (completion,) = generate(engine, ask(text, "still", max_new_tokens=2))
    assert completion.policy_version == 3


def test_folders_of_old_versions_are_deleted(engine: VLLMEngine, adapters: dict[int, AdapterPayload]) -> None:
    for version in (4, 5, 6):
        asyncio.run(engine.load_adapter(adapters[version]))
    assert len(list(engine._shelf._root.iterdir())) == 2


def test_the_engine_core_and_the_files_are_gone_after_close(engine: VLLMEngine, text: TextSide) -> None:
    # The last test of the module's engine.
    core = _engine_core(psutil.Process())
    root = engine._shelf._root
    assert core.is_running() and root.is_dir()

    async def close_while_busy() -> None:
        call = asyncio.create_task(engine.generate([ask(text, "cut off", n=8, max_new_tokens=900)]))
        await asyncio.sleep(0.2)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await call
        with pytest.raises(EngineError, match="closed"):
            await engine.generate([ask(text, "late")])

    asyncio.run(close_while_busy())
    assert not psutil.pid_exists(core.pid) and not root.exists()
    assert not engine.dead  # closed is not dead


def test_the_engine_core_dies_with_a_killed_owner(owner: subprocess.Popen[str]) -> None:
    assert owner.stdout is not None
    root = Path(owner.stdout.readline().strip())
    core = _engine_core(psutil.Process(owner.pid))
    owner.kill()
    owner.wait()
    core.wait(timeout=10)
    assert root.is_dir()
    AdapterShelf().close()  # the next engine on the machine sweeps
    assert not root.exists()


def test_a_dead_engine_core_is_noticed(model: Path, text: TextSide) -> None:
    engine = VLLMEngine(model, dtype="float32", serving=SERVING, max_lora_rank=8)

    async def kill_while_busy() -> None:
        call = asyncio.create_task(engine.generate([ask(text, "unlucky", n=8, max_new_tokens=900)]))
        while engine._llm.get_num_unfinished_requests() < 8:
            await asyncio.sleep(0.01)
        assert not engine.dead
        _engine_core(psutil.Process()).kill()
        with pytest.raises(EngineError, match="died"):
            await asyncio.wait_for(call, 20)
        assert engine.dead
        with pytest.raises(EngineError, match="died"):
            await engine.generate([ask(text, "after")])
        await engine.close()

    asyncio.run(kill_while_busy())


def test_a_start_that_fails_says_why(model: Path) -> None:
    with pytest.raises(EngineError, match=r"vLLM did not start: .*max_model_len"):
        VLLMEngine(model, dtype="float32", serving=ServingSection(max_context=1_000_000))


def test_a_machine_without_vllm_is_told_what_to_install(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UserInputError, match=r"requirements/gpu.txt, or requirements/cpu.txt"):
        VLLMEngine(model, dtype="float32", serving=SERVING)


def _engine_core(process: psutil.Process) -> psutil.Process:
    # vLLM sets the title of its process.
    (core,) = [child for child in process.children() if child.name().startswith("VLLM")]
    return core
