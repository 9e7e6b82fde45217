"""The transformers engine: versions, cancellation, refused requests, failures. What it samples is in test_decoder.py."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_support import adapted_policy, picture, request
from engine_support import endless, out_of_memory, until
from safetensors.torch import load, save

from rl_vlm.engines.base import EngineError
from rl_vlm.engines.cache import RowCache
from rl_vlm.engines.decoder import Decoder
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.models.images import TextSide
from rl_vlm.models.weights import AdapterPayload
from rl_vlm.types import Completion, EncodedImage, GenerationRequest, SamplingParams, UserInputError

CONTEXT = 1024


@pytest.fixture(scope="module")
def payload(tiny_folder: Path) -> AdapterPayload:
    """Version 1: an adapter that changes the model a lot."""
    return adapted_policy(tiny_folder, seed=1).payload(1)


@pytest.fixture
def engine(tiny_folder: Path) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(tiny_folder, max_context=CONTEXT)
    yield engine
    asyncio.run(engine.close())


def later(payload: AdapterPayload, version: int) -> AdapterPayload:
    return dataclasses.replace(payload, version=version)


def of_state(state: dict[str, torch.Tensor], payload: AdapterPayload, version: int = 9) -> AdapterPayload:
    """A payload of other tensors whose hash is right."""
    tensors = save({name: tensor.contiguous() for name, tensor in state.items()})
    return AdapterPayload(version, tensors, payload.config_json, hashlib.sha256(tensors).hexdigest())


def rows(engine: TransformersEngine) -> int:
    return engine.stats().running


async def one(engine: TransformersEngine, asked: GenerationRequest) -> Completion:
    return (await engine.generate([asked]))[0]


def words(completion: Completion) -> list[list[int]]:
    return [sample.token_ids.tolist() for sample in completion.samples]


def fixed(text: TextSide, name: str = "fixed", **more: Any) -> GenerationRequest:
    """A request whose answer is a function of the weights."""
    return request(text, ["Say something."], name=name, **{"max_new_tokens": 24, "n": 2, "seeds": (1, 2), **more})


def test_more_samples_than_rows_are_sampled_bit_by_bit(tiny_folder: Path, text: TextSide) -> None:
    narrow = TransformersEngine(tiny_folder, max_context=CONTEXT, max_rows=3)
    most = 0

    async def watched() -> list[Completion]:
        nonlocal most
        call = asyncio.ensure_future(narrow.generate([fixed(text, name=str(k), seeds=(k, k + 9)) for k in range(6)]))
        while not call.done():
            most = max(most, rows(narrow))
            await asyncio.sleep(0.001)
        return await call

    answers = asyncio.run(watched())
    assert [words(answer) for answer in answers] == [
        words(asyncio.run(one(narrow, fixed(text, seeds=(k, k + 9))))) for k in range(6)
    ]
    assert most == 2  # two samples each: a second request would make four rows
    wide = asyncio.run(one(narrow, fixed(text, n=5, seeds=tuple(range(5)))))
    assert len(wide.samples) == 5  # a single request that is wider than the engine runs alone
    asyncio.run(narrow.close())


# --- refused requests


SHOWN = picture(np.random.default_rng(0))
REFUSED: dict[str, Callable[[TextSide], dict[str, Any]]] = {
    "too long": lambda text: {"sampling": SamplingParams(CONTEXT)},
    "without its image": lambda text: {"images": ()},
    "a damaged image": lambda text: {"images": (EncodedImage("0" * 64, SHOWN.png[:40], SHOWN.width, SHOWN.height),)},
    "empty": lambda text: {"prompt_ids": np.zeros(0, dtype=np.int32)},
    "beyond the vocabulary": lambda text: {"prompt_ids": np.array([1, text.vocab_size], dtype=np.int32)},
    "below the vocabulary": lambda text: {"prompt_ids": np.array([1, -1], dtype=np.int32)},
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=REFUSED)
def test_a_request_that_cannot_be_answered_is_refused_and_others_go_on(
    engine: TransformersEngine, text: TextSide, change: Callable[[TextSide], dict[str, Any]]
) -> None:
    shown = [SHOWN] if "images" in change(text) else []
    bad = dataclasses.replace(request(text, [*shown, "What?"], name="fixed"), **change(text))

    async def mixed() -> list[Any]:
        running = asyncio.ensure_future(one(engine, fixed(text, max_new_tokens=80)))
        await until(lambda: rows(engine) > 0)
        async with asyncio.timeout(120):
            return await asyncio.gather(
                running,
                engine.generate([fixed(text), bad, fixed(text)]),
                one(engine, fixed(text)),
                return_exceptions=True,
            )

    with endless(engine, text):
        long = words(asyncio.run(one(engine, fixed(text, max_new_tokens=80))))
        short = words(asyncio.run(one(engine, fixed(text))))
        running, refused, beside = asyncio.run(mixed())
    assert isinstance(refused, EngineError)
    assert "fixed" in str(refused)
    assert words(running) == long
    assert words(beside) == short
    assert rows(engine) == 0
    with endless(engine, text):
        assert words(asyncio.run(one(engine, fixed(text)))) == short


def test_an_error_in_the_forward_pass_reaches_its_callers_and_the_engine_goes_on(
    engine: TransformersEngine, text: TextSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = words(asyncio.run(one(engine, fixed(text))))
    for call in (1, 2, 5):  # the prefill, the first step, a later step
        with endless(engine, text), monkeypatch.context() as patch, pytest.raises(EngineError, match="out of memory"):
            out_of_memory(engine, call, patch)
            asyncio.run(one(engine, fixed(text)))
        assert rows(engine) == 0
        assert words(asyncio.run(one(engine, fixed(text)))) == expected


@pytest.mark.parametrize("running", [False, True])
def test_memory_that_runs_out_while_rows_are_added_leaves_no_trace(
    engine: TransformersEngine, text: TextSide, monkeypatch: pytest.MonkeyPatch, running: bool
) -> None:
    """The cache has grown for some layers and not for others: none of it may be used again."""
    expected = words(asyncio.run(one(engine, fixed(text))))
    admit = RowCache.admit

    def half_done(self: RowCache, layers: Any, source: Any, max_length: int) -> int:
        if len(source) == 7:
            admit(self, layers[:1], source, max_length)
            raise torch.OutOfMemoryError("out of memory")
        return admit(self, layers, source, max_length)

    monkeypatch.setattr(RowCache, "admit", half_done)

    async def fail() -> None:
        calls = [asyncio.ensure_future(one(engine, fixed(text, max_new_tokens=300)))] if running else []
        if running:
            await until(lambda: rows(engine) > 0)
        calls.append(asyncio.ensure_future(one(engine, fixed(text, n=7, seeds=None))))
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(outcome, EngineError) for outcome in outcomes)

    with endless(engine, text):
        asyncio.run(fail())
    assert words(asyncio.run(one(engine, fixed(text)))) == expected


def test_a_call_of_many_parts_says_for_each_part_which_version_sampled_it(
    tiny_folder: Path, text: TextSide, payload: AdapterPayload
) -> None:
    narrow = TransformersEngine(tiny_folder, max_context=CONTEXT, max_rows=2)

    async def swap() -> list[Completion]:
        call = asyncio.ensure_future(narrow.generate([fixed(text, name=str(k), max_new_tokens=400) for k in range(3)]))
        await until(lambda: rows(narrow) > 0)
        await narrow.load_adapter(payload)
        return await call

    with endless(narrow, text):
        answers = asyncio.run(swap())
        new = asyncio.run(one(narrow, fixed(text, max_new_tokens=400)))
    versions = [answer.policy_version for answer in answers]
    assert versions == sorted(versions)
    assert versions[0] == 0
    assert versions[-1] == 1
    assert words(answers[-1]) == words(new)
    assert words(answers[0]) != words(new)
    asyncio.run(narrow.close())


def test_versions_follow_each_other_without_a_trace_of_the_older(
    engine: TransformersEngine, text: TextSide, tiny_folder: Path, payload: AdapterPayload
) -> None:
    """The second adapter covers fewer layers than the first."""
    attention = adapted_policy(tiny_folder, seed=2, model__lora__target_modules="attn").payload(2)
    fresh = TransformersEngine(tiny_folder, max_context=CONTEXT)
    asyncio.run(fresh.load_adapter(attention))
    expected = words(asyncio.run(one(fresh, fixed(text))))
    asyncio.run(fresh.close())
    asyncio.run(engine.load_adapter(payload))
    asyncio.run(one(engine, fixed(text)))
    asyncio.run(engine.load_adapter(attention))
    assert words(asyncio.run(one(engine, fixed(text)))) == expected


BROKEN: dict[str, Callable[[AdapterPayload], AdapterPayload]] = {
    "a flipped bit": lambda p: dataclasses.replace(p, tensors=bytes(p.tensors[:-1]) + bytes([p.tensors[-1] ^ 1])),
    "another hash": lambda p: dataclasses.replace(p, sha256="0" * 64),
    "half a file": lambda p: dataclasses.replace(
        p, tensors=p.tensors[: len(p.tensors) // 2], sha256=hashlib.sha256(p.tensors[: len(p.tensors) // 2]).hexdigest()
    ),
    "no file": lambda p: dataclasses.replace(p, tensors=b"", sha256=hashlib.sha256(b"").hexdigest()),
    "another model": lambda p: of_state(
        {k.replace("layers.0", "layers.7"): v for k, v in load(bytes(p.tensors)).items()}, p
    ),
    "a missing half": lambda p: of_state({k: v for k, v in load(bytes(p.tensors)).items() if "lora_B" not in k}, p),
    "other shapes": lambda p: of_state({k: v[:, :4] for k, v in load(bytes(p.tensors)).items()}, p),
    "shapes that would broadcast": lambda p: of_state(
        {k: v[:1] if "lora_B" in k else v for k, v in load(bytes(p.tensors)).items()}, p
    ),
    "not a number": lambda p: of_state({k: v * float("nan") for k, v in load(bytes(p.tensors)).items()}, p),
    "no configuration": lambda p: dataclasses.replace(p, config_json="{"),
    "another configuration": lambda p: dataclasses.replace(p, config_json="{}"),
    "dora": lambda p: dataclasses.replace(
        p, config_json=p.config_json.replace('"use_dora": false', '"use_dora": true')
    ),
}


@pytest.mark.parametrize("broken", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_adapter_is_refused_and_the_engine_goes_on(
    engine: TransformersEngine,
    text: TextSide,
    payload: AdapterPayload,
    broken: Callable[[AdapterPayload], AdapterPayload],
) -> None:
    asyncio.run(engine.load_adapter(payload))
    expected = words(asyncio.run(one(engine, fixed(text))))
    with pytest.raises(UserInputError):
        asyncio.run(engine.load_adapter(later(broken(payload), 2)))
    assert engine.version == 1
    assert words(asyncio.run(one(engine, fixed(text)))) == expected
    asyncio.run(engine.load_adapter(later(payload, 3)))
    assert engine.version == 3


def test_a_lockstep_call_depends_on_itself_alone_bit_for_bit(tiny_folder: Path, text: TextSide) -> None:
    engine = TransformersEngine(tiny_folder, max_context=CONTEXT, lockstep=True)
    calls = [[fixed(text, name=f"{call}:{k}", seeds=(call, k)) for k in range(call + 1)] for call in range(4)]
    most = 0

    async def together() -> list[list[Completion]]:
        nonlocal most
        work = asyncio.gather(*(engine.generate(call) for call in calls))
        while not work.done():
            most = max(most, rows(engine))
            await asyncio.sleep(0.001)
        return await work

    def bits(answers: list[Completion]) -> list[tuple[bytes, bytes]]:
        return [(s.token_ids.tobytes(), s.logprobs.tobytes()) for answer in answers for s in answer.samples]

    alone = [bits(asyncio.run(engine.generate(call))) for call in calls]
    assert [bits(answers) for answers in asyncio.run(together())] == alone
    assert most == 8  # the largest call's own samples
    asyncio.run(engine.close())


def test_closing_fails_what_runs_and_what_waits(tiny_folder: Path, text: TextSide, payload: AdapterPayload) -> None:
    engine = TransformersEngine(tiny_folder, max_context=CONTEXT, lockstep=True)

    async def close() -> list[Any]:
        work = [asyncio.ensure_future(engine.generate([fixed(text, max_new_tokens=900)])) for _ in range(3)]
        await until(lambda: rows(engine) > 0)
        await engine.close()
        async with asyncio.timeout(120):
            return await asyncio.gather(*work, return_exceptions=True)

    with endless(engine, text):
        outcomes = asyncio.run(close())
    assert all(isinstance(outcome, EngineError) and "closed" in str(outcome) for outcome in outcomes)
    for call in (lambda: engine.generate([fixed(text)]), lambda: engine.load_adapter(payload)):
        with pytest.raises(EngineError, match="closed"):
            asyncio.run(call())  # type: ignore[arg-type]
    asyncio.run(engine.close())  # closing twice is no error


def test_rows_of_a_cancelled_call_are_free_before_others_are_admitted(
    engine: TransformersEngine, text: TextSide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its place in the HTTP side's memory is given to the next one at once."""
    stepped, go_on = threading.Event(), threading.Event()
    step, admit, beside = Decoder.step, Decoder.admit, []

    def held_up(self: Decoder) -> Any:
        jobs = step(self)
        stepped.set()
        assert go_on.wait(60)
        return jobs

    def noted(self: Decoder, jobs: Any) -> Any:
        beside.append(self.num_rows)
        return admit(self, jobs)

    async def cancelled() -> None:
        call = asyncio.ensure_future(engine.generate([fixed(text, max_new_tokens=900, n=5, seeds=None)]))
        assert await asyncio.to_thread(stepped.wait, 60)
        call.cancel()
        await asyncio.sleep(0)
        following = asyncio.ensure_future(engine.generate([fixed(text)]))
        await until(lambda: engine.stats().waiting > 0)
        go_on.set()
        await following

    monkeypatch.setattr(Decoder, "step", held_up)
    monkeypatch.setattr(Decoder, "admit", noted)
    with endless(engine, text):
        asyncio.run(cancelled())
    assert beside == [0, 0]
