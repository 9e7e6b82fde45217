"""The vLLM engine against transformers, on a tiny model whose logits favour the image placeholder."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import psutil
import pytest
import torch
from form_support import ask_all, requests
from http_support import EngineBackend, serving
from vllm_support import (
    TeacherForcing,
    ask,
    converse,
    generate,
    hostile_model,
    picture,
    random_adapters,
    read_stream,
    request_like,
    vllm_config,
)

from rl_vlm.config import parse_config
from rl_vlm.engines import vllm_setup
from rl_vlm.engines.base import BASE_MODEL, EngineError
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.engines.vllm_engine import VLLMEngine
from rl_vlm.engines.vllm_weights import AdapterVersions
from rl_vlm.models.families.qwen_vl import ImageProcessorSpec
from rl_vlm.models.images import PixelLimits, TextSide
from rl_vlm.models.loading import load_model, load_text_side
from rl_vlm.models.lora import inject_lora, lora_config, lora_state
from rl_vlm.models.weights import AdapterPayload
from rl_vlm.types import (
    Completion,
    GenerationRequest,
    Grammar,
    SampleChunk,
    SamplingParams,
    StopReason,
    UserInputError,
)

pytestmark = [pytest.mark.timeout(600), pytest.mark.real]

PIXELS = PixelLimits(64 * 64, 72 * 96)  # not the processor's own: pictures become larger and smaller by them
TOLERANCE = 1e-4
CHOICES = ("red", "red square", "redder", "0", "1", "-1")
SCHEMA = (
    '{"type": "object", "properties": {"a": {"enum": [true, "no"]}}, "required": ["a"], "additionalProperties": false}'
)

# An owner that is killed; the test file's own process must survive.
OWNER = """
import sys, time
from pathlib import Path
from rl_vlm.config import parse_config
from rl_vlm.engines.vllm_engine import VLLMEngine
if __name__ == "__main__":
    engine = VLLMEngine(Path(sys.argv[1]), parse_config({"serving": {"engine": "vllm", "max_context": 256}, "rollout": {"max_new_tokens": 64}}))
    print(engine._versions.root, flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="session")
def model() -> Path:
    return hostile_model()


@pytest.fixture(scope="session")
def text(model: Path) -> TextSide:
    return load_text_side(model, PIXELS)


@pytest.fixture(scope="module")
def owner(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[str]]:
    """Another process with an engine."""
    script = tmp_path_factory.mktemp("owner") / "owner.py"
    script.write_text(OWNER)
    process = subprocess.Popen([sys.executable, str(script), str(model)], stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[VLLMEngine]:
    limits = {"min_pixels": PIXELS.minimum, "max_pixels": PIXELS.maximum}
    engine = VLLMEngine(model, vllm_config(1024, rank=8, **limits))
    yield engine
    asyncio.run(engine.close())


@pytest.fixture(scope="module")
def other_engine(model: Path) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(model, max_context=1024, pixels=PIXELS)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture(scope="module")
def adapters(model: Path) -> dict[int, AdapterPayload]:
    return random_adapters(model, 6)


@pytest.fixture(scope="module")
def base_forcing(model: Path, text: TextSide) -> TeacherForcing:
    return TeacherForcing(model, text)


def test_greedy_tokens_equal_the_transformers_engine(
    engine: VLLMEngine, other_engine: TransformersEngine, text: TextSide
) -> None:
    requests = [
        ask(text, "none", temperature=0.0),
        ask(text, "one", picture(1), temperature=0.0),
        ask(text, "two", picture(2), picture(3, 128, 32), temperature=0.0),
        ask(text, "small and large", picture(4, 20, 30), picture(5, 300, 200), picture(6), temperature=0.0),
    ]
    for one, two in zip(generate(engine, *requests), generate(other_engine, *requests), strict=True):
        assert one.request_id == two.request_id and one.policy_version == two.policy_version == 0
        np.testing.assert_array_equal(one.prompt_ids, two.prompt_ids)
        np.testing.assert_array_equal(one.samples[0].token_ids, two.samples[0].token_ids)
        assert one.prompt_ids.dtype == one.samples[0].token_ids.dtype == np.int32
        np.testing.assert_allclose(one.samples[0].logprobs, two.samples[0].logprobs, atol=TOLERANCE)
        assert one.samples[0].stop_reason is two.samples[0].stop_reason


PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.6},
    {"repetition_penalty": 0.6},
    {"frequency_penalty": 1.1, "presence_penalty": -0.7},
    {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.3, "min_tokens": 12},
]


@pytest.mark.parametrize("penalties", PENALTIES, ids=str)
def test_penalties_equal_the_transformers_engines(
    engine: VLLMEngine, other_engine: TransformersEngine, text: TextSide, penalties: dict[str, Any]
) -> None:
    """Whose own are held against transformers' logits processors."""
    requests = [
        ask(text, "again again", picture(40), temperature=0.0, **penalties),
        ask(text, "plain", temperature=0.0),
    ]
    for one, two in zip(generate(engine, *requests), generate(other_engine, *requests), strict=True):
        np.testing.assert_array_equal(one.samples[0].token_ids, two.samples[0].token_ids)
        np.testing.assert_allclose(one.samples[0].logprobs, two.samples[0].logprobs, atol=TOLERANCE)


@pytest.mark.parametrize(
    "warp", [{"min_p": 0.2}, {"min_p": 0.02, "top_p": 0.7}, {"min_p": 0.02, "presence_penalty": 1.0}]
)
def test_min_p_leaves_the_transformers_engines_distribution(
    engine: VLLMEngine, other_engine: TransformersEngine, text: TextSide, warp: dict[str, Any]
) -> None:
    request = ask(text, "first", picture(41), temperature=1.5, seeds=(1,), max_new_tokens=1, top_logprobs=20, **warp)
    one, two = (dict(generate(each, request)[0].samples[0].top_logprobs[0]) for each in (engine, other_engine))
    assert one.keys() == two.keys()
    np.testing.assert_allclose([one[token] for token in two], list(two.values()), atol=TOLERANCE)


def test_samples_end_neither_early_nor_before_their_least_length(engine: VLLMEngine, text: TextSide) -> None:
    long = ask(text, "on", n=8, temperature=2.0, max_new_tokens=60, ignore_eos=True)
    least = ask(text, "on", n=8, temperature=2.0, max_new_tokens=60, min_tokens=20)
    endless, kept = generate(engine, long, least)
    assert {(len(s.token_ids), s.stop_reason) for s in endless.samples} == {(60, StopReason.LENGTH)}
    assert all(len(sample.token_ids) >= 20 for sample in kept.samples)


def test_progress_is_counted_while_no_sample_has_ended(engine: VLLMEngine, text: TextSide) -> None:
    async def watch() -> list[tuple[int, int]]:
        request = ask(text, "long", n=16, temperature=1.0, max_new_tokens=300, ignore_eos=True)
        work = asyncio.ensure_future(engine.generate([request]))
        seen = []
        while not work.done():
            stats = engine.stats()
            seen.append((stats.generated_tokens, stats.progress))
            await asyncio.sleep(0.05)
        await work
        return seen

    tokens, steps = (sorted(set(values)) for values in zip(*asyncio.run(watch()), strict=True))
    assert len(tokens) > 5 and len(steps) > 5
    assert tokens[-1] - tokens[0] > 16 * 100


def mixed_batch(text: TextSide, **sampling: Any) -> list[GenerationRequest]:
    """Prompts of many lengths with none to three images, as one call."""
    sizes = [(96, 64), (64, 64), (40, 90)]
    return [
        ask(text, "words " * (3 * k), *(picture(10 * k + i, *sizes[i]) for i in range(k % 4)), **sampling)
        for k in range(8)
    ]


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
    requests = mixed_batch(text, temperature=temperature, seeds=(9,))
    assert base_forcing.error(requests, generate(engine, *requests)) < TOLERANCE


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


def test_choices_have_the_distribution_of_the_transformers_engine(
    engine: VLLMEngine, other_engine: TransformersEngine, text: TextSide
) -> None:
    def drawn(engine: Any, **sampling: Any) -> dict[str, np.ndarray]:
        (answer,) = generate(engine, ask(text, "choose", picture(20), choices=CHOICES, **sampling))
        for sample in answer.samples:
            assert sample.stop_reason is StopReason.END_OF_TURN
            choice = text.codec.decode(sample.token_ids)
            assert sample.token_ids[:-1].tolist() == text.codec.encode_text(choice).tolist()
        return {text.codec.decode(sample.token_ids): sample.logprobs for sample in answer.samples}

    common: dict[str, Any] = {"temperature": 2.0, "n": 48, "seeds": tuple(range(48))}
    ours, theirs = drawn(engine, **common), drawn(other_engine, **common)
    assert ours.keys() | theirs.keys() <= set(CHOICES)
    both = ours.keys() & theirs.keys()
    assert len(both) >= 4 and len(both & {"red", "red square", "redder"}) >= 1
    for choice in both:
        np.testing.assert_allclose(ours[choice], theirs[choice], rtol=0, atol=TOLERANCE)
    (greedy,) = drawn(engine, temperature=0.0)
    assert (greedy,) == tuple(drawn(other_engine, temperature=0.0))
    with pytest.raises(EngineError, match="max_new_tokens"):
        drawn(engine, max_new_tokens=2)


def test_alternatives_equal_those_of_the_transformers_engine(
    engine: VLLMEngine, other_engine: TransformersEngine, text: TextSide
) -> None:
    forbidden = set(text.codec.suppressed_token_ids(text.vocab_size).tolist())
    grammars = {"regex": "[a-f0-9]{1,9}", "json_schema": SCHEMA, "grammar": 'root ::= "yes" | "no" [0-9]+'}
    bound: list[dict[str, Any]] = [{"grammar": Grammar(kind, own)} for kind, own in grammars.items()]  # type: ignore[arg-type]
    thought: dict[str, Any] = {"opened_thought": True, "max_thought_tokens": 3, "max_new_tokens": 12}
    changed = [{"logit_bias": ((18, 5.0), (7, -50.0))}, {"bad_words": ("the", "a", "3")}, {"prompt_logprobs": 2}]
    for sampling in ({}, {"top_k": 3}, {"choices": ("12", "13", "no")}, *bound, thought, bound[0] | thought, *changed):
        request = ask(text, "alternatives", picture(21), temperature=0.0, top_logprobs=6, **sampling)
        (ours,), (theirs,) = generate(engine, request), generate(other_engine, request)
        np.testing.assert_array_equal(ours.samples[0].token_ids, theirs.samples[0].token_ids)
        places = [[dict(place) for place in answer.prompt_logprobs] for answer in (ours, theirs)]
        assert len(places[0]) == (len(ours.prompt_ids) - 1) * ("prompt_logprobs" in sampling)
        for one, two in zip(*places, strict=True):
            assert one == pytest.approx(two, abs=TOLERANCE)
        assert len(ours.samples[0].top_logprobs) == len(ours.samples[0].token_ids)
        for one, two in zip(ours.samples[0].top_logprobs, theirs.samples[0].top_logprobs, strict=True):
            assert [token for token, _ in one] == [token for token, _ in two]
            assert forbidden.isdisjoint(token for token, _ in one) and len(one) >= 1
            np.testing.assert_allclose([value for _, value in one], [value for _, value in two], atol=TOLERANCE)
    (plain,) = generate(engine, ask(text, "plain"))
    assert plain.samples[0].top_logprobs == ()
    # Prompts that share a step have more rows of logits than samples.
    several = [ask(text, "alternatives"[k:], picture(k), max_new_tokens=1, prompt_logprobs=1) for k in range(4)]
    for one, two in zip(generate(engine, *several), generate(other_engine, *several), strict=True):
        for ours_at, theirs_at in zip(one.prompt_logprobs, two.prompt_logprobs, strict=True):
            assert dict(ours_at) == pytest.approx(dict(theirs_at), abs=TOLERANCE)


def test_schemas_are_kept_and_refused_as_by_the_transformers_engine(engine: VLLMEngine, text: TextSide) -> None:
    suite = json.loads((Path(__file__).parents[1] / "fixtures/answers/json_schemas.json").read_text())

    def asked(name: str, schema: Any) -> GenerationRequest:
        grammar = Grammar("json_schema", json.dumps(schema))
        return ask(text, name, temperature=1.0, n=4, max_new_tokens=120, grammar=grammar)

    some = list(suite["followed"].items())[::6]
    done = 0
    for (name, schema), answer in zip(some, generate(engine, *(asked(*one) for one in some)), strict=True):
        for sample in answer.samples:
            if sample.stop_reason is StopReason.END_OF_TURN:
                said = json.loads(text.codec.decode(sample.token_ids[:-1]))
                kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
                assert kind(schema).is_valid(said), (name, said)
                done += 1
    assert done > 2 * len(some)
    for name, (word, schema) in list(suite["refused"].items())[::6]:
        with pytest.raises(EngineError, match=re.escape(word)):
            generate(engine, asked(name, schema))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("schemas", "tools"), [(40, 10), pytest.param(2000, 500, marks=pytest.mark.acceptance)])
def test_no_schema_and_no_tools_hurt_a_server(engine: VLLMEngine, model: Path, schemas: int, tools: int) -> None:
    with serving(EngineBackend(engine), model) as server:
        statuses, seconds, mib = ask_all(server, requests(1, schemas, tools))
    assert statuses.total() == schemas + tools and statuses[200] > 0.15 * schemas, statuses
    assert seconds < 30 and mib < 512, (seconds, mib)  # of a busy machine; 2 s on an idle one


@pytest.mark.parametrize("more", [{"top_logprobs": 2}, {"stop": ("e", "t")}, {"choices": CHOICES}])
def test_a_stream_gives_what_generate_gives_token_by_token(
    engine: VLLMEngine, text: TextSide, more: dict[str, Any]
) -> None:
    request = ask(text, "streamed", picture(22), n=2, seeds=(1, 2), **more)
    (whole,) = generate(engine, request)
    chunks = asyncio.run(read_stream(engine, request))
    assert {chunk.policy_version for chunk in chunks} == {whole.policy_version}
    for number, sample in enumerate(whole.samples):
        mine = [chunk for chunk in chunks if chunk.number == number]
        np.testing.assert_array_equal(np.concatenate([chunk.token_ids for chunk in mine]), sample.token_ids)
        np.testing.assert_allclose(np.concatenate([chunk.logprobs for chunk in mine]), sample.logprobs, atol=TOLERANCE)
        assert [chunk.stop_reason for chunk in mine][-1] is sample.stop_reason
        assert {chunk.stop_reason for chunk in mine[:-1]} <= {None}
        assert sum(len(chunk.top_logprobs) for chunk in mine) == len(sample.top_logprobs)
    # Short answers may come whole from a busy machine.
    assert len(chunks) > 2 or "top_logprobs" not in more


def test_closing_a_stream_aborts_its_requests_and_errors_end_it(engine: VLLMEngine, text: TextSide) -> None:
    async def leave() -> None:
        stream = engine.stream(ask(text, "left", n=4, temperature=0.5, max_new_tokens=900))
        first: SampleChunk = await anext(stream)
        assert len(first.token_ids) >= 1
        await stream.aclose()
        async with asyncio.timeout(10):
            while engine._llm.get_num_unfinished_requests():
                await asyncio.sleep(0.01)

    asyncio.run(leave())
    with pytest.raises(EngineError, match="context"):
        asyncio.run(read_stream(engine, ask(text, "long", max_new_tokens=5000)))


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
        patch.setattr(ImageProcessorSpec, "count_tokens", lambda self, width, height, name: 5)
        with pytest.raises(EngineError, match="grids"):
            generate(engine, good)
    (completion,) = generate(engine, good)
    np.testing.assert_array_equal(completion.prompt_ids, text.expand(good.prompt_ids, good.images))
    assert generate(engine) == []


def test_cancelling_a_call_aborts_its_requests(engine: VLLMEngine, text: TextSide) -> None:
    async def cancel() -> int:
        long = ask(text, "long", n=8, temperature=0.5, max_new_tokens=900, ignore_eos=True)
        call = asyncio.create_task(engine.generate([long]))
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
        long = replace(request, sampling=SamplingParams(400, n=8, temperature=1.0, ignore_eos=True))
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
    requests = mixed_batch(text, seeds=(5,))
    assert forcing[2].error(requests, generate(engine, *requests)) < TOLERANCE
    chunks = asyncio.run(read_stream(engine, requests[0]))
    assert {chunk.policy_version for chunk in chunks} == {2}
    assert engine.stats().adapter_swaps == 3 and engine.stats().last_swap_s > 0


def test_unfit_adapters_are_refused_and_the_engine_keeps_its_version(
    engine: VLLMEngine, model: Path, text: TextSide, adapters: dict[int, AdapterPayload]
) -> None:
    asyncio.run(engine.load_adapter(adapters[3]))
    hf = load_model(model)
    config = lora_config(rank=12, alpha=12, target_modules="attn")
    too_high = AdapterPayload.build(4, lora_state(inject_lora(hf, config)), config)
    visual = {name.replace("language_model.layers", "visual.blocks"): t for name, t in adapters[3].state().items()}
    unfit = {"rank": too_high, "only the language model": AdapterPayload.build(4, visual, lora_config(4, 16, "all"))}
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
    assert len(list(engine._versions.root.iterdir())) == 2


def test_the_engine_core_and_the_files_are_gone_after_close(engine: VLLMEngine, text: TextSide) -> None:
    # The last test of the module's engine.
    core = _engine_core(psutil.Process())
    root = engine._versions.root
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


@pytest.mark.acceptance
def test_the_engine_core_dies_with_a_killed_owner(owner: subprocess.Popen[str]) -> None:
    assert owner.stdout is not None
    root = Path(owner.stdout.readline().strip())
    core = _engine_core(psutil.Process(owner.pid))
    owner.kill()
    owner.wait()
    core.wait(timeout=10)
    assert root.is_dir()
    AdapterVersions(None, None).close()  # the next engine on the machine sweeps
    assert not root.exists()


@pytest.mark.acceptance
def test_a_dead_engine_core_is_noticed(model: Path, text: TextSide) -> None:
    engine = VLLMEngine(model, vllm_config(1024, rank=8))

    async def kill_while_busy() -> None:
        call = asyncio.create_task(engine.generate([ask(text, "unlucky", n=8, max_new_tokens=900, ignore_eos=True)]))
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


@pytest.mark.slow
def test_a_start_that_fails_says_why(model: Path) -> None:
    with pytest.raises(EngineError, match="max_model_len"):
        VLLMEngine(model, vllm_config(1_000_000))


def _engine_core(process: psutil.Process) -> psutil.Process:
    # vLLM sets the title of its process.
    (core,) = [child for child in process.children() if child.name().startswith("VLLM")]
    return core


# --- What vLLM is told on a GPU; this machine needs none


GIB = 1 << 30


@pytest.mark.parametrize(("share", "sized"), [(0.5, True), (1.0, False)])
def test_keys_and_values_are_sized_on_a_shared_gpu(
    share: float, sized: bool, wide_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = parse_config({"serving": {"gpus_per_replica": share}, "model": {"dtype": "bfloat16"}})
    vllm_setup.prepare_environment(run.serving)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(vllm_setup, "_card_bytes", lambda: int(23.6 * GIB))
    args = vllm_setup.engine_args(wide_folder, run, load_text_side(wide_folder))
    assert args.max_num_batched_tokens == 8192
    assert args.cudagraph_capture_sizes[-1] == args.max_num_seqs == 256  # vLLM's own end at 512
    assert args.gpu_memory_utilization == pytest.approx(0.94 * share)
    assert (args.kv_cache_memory_bytes is not None) == sized
    if sized:
        assert 7 * GIB < args.kv_cache_memory_bytes < 0.47 * 23.6 * GIB


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_replica_without_a_gpu_takes_none_though_torch_sees_one(
    gpus: int, wide_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray gives it to others."""
    run = parse_config({"serving": {"engine": "vllm", "gpus_per_replica": gpus}, "model": {"dtype": "bfloat16"}})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("VLLM_PLUGINS", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.delenv(name, raising=False)
    vllm_setup.prepare_environment(run.serving)
    assert os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == (None if gpus else "0")
    args = vllm_setup.engine_args(wide_folder, run, load_text_side(wide_folder))
    assert args.enforce_eager == (not gpus) and args.mm_processor_cache_gb == (4 if gpus else 0.5)
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: False)  # a vLLM for GPUs
    if not gpus:
        with pytest.raises(UserInputError, match="gpus_per_replica=1"):
            vllm_setup.prepare_environment(run.serving)


@pytest.mark.parametrize(
    ("card", "dtype", "kernels"),
    [
        ((10, 0), "bfloat16", "FLASH_ATTN"),
        ((10, 3), "float16", "FLASH_ATTN"),
        ((10, 0), "float32", None),  # it has none of them
        ((9, 0), "bfloat16", None),
        ((12, 0), "bfloat16", None),
    ],
)
def test_no_kernels_are_chosen_that_need_a_compiler_or_a_network(
    card: tuple[int, int], dtype: str, kernels: str | None, wide_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer's, which vLLM prefers on a B200, and for layers of linear attention on a H100, too."""
    run = parse_config({"serving": {"gpus_per_replica": 1}, "model": {"dtype": dtype}})
    vllm_setup.prepare_environment(run.serving)
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    monkeypatch.setattr(type(current_platform), "get_device_capability", lambda device_id=0: DeviceCapability(*card))
    args = vllm_setup.engine_args(wide_folder, run, load_text_side(wide_folder))
    assert (args.attention_backend, args.gdn_prefill_backend) == (kernels, "triton")
