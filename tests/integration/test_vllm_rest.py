"""vLLM between two rounds of sampling: the memory of keys and values is given away, weights and adapters stay.

The CPU build cannot free that memory, so a worker of the tests spoils it instead; vLLM's pauses and calls are its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_support import pictures, request, text_side
from policy_loop import MAX_CONTEXT
from version_support import distances, model_of, random_payload
from vllm_support import vllm_config

from rl_vlm.engines import vllm_engine
from rl_vlm.engines.base import EngineError
from rl_vlm.engines.vllm_engine import VLLMEngine
from rl_vlm.types import GenerationRequest

pytestmark = [pytest.mark.timeout(600), pytest.mark.acceptance]


@pytest.fixture(scope="module")
def engine(wide_folder: Path) -> Iterator[VLLMEngine]:
    make = vllm_engine.engine_args

    def with_worker(*args: Any, **settings: Any) -> Any:
        made = make(*args, **settings)
        made.worker_cls = "forgetful_worker.ForgetfulWorker"
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_engine, "engine_args", with_worker)
        engine = VLLMEngine(wide_folder, vllm_config(MAX_CONTEXT, slots=3))
    engine._gives_back = True  # as on a GPU with rest_while_learning
    yield engine
    asyncio.run(engine.close())


def asked(folder: Path, max_new_tokens: int = 24) -> list[GenerationRequest]:
    """Prompts with one image and with none, in two samples each."""
    text, images = text_side(folder), pictures(np.random.default_rng(0), 1)
    sampling: dict[str, Any] = {"n": 2, "temperature": 0.9, "ignore_eos": True, "max_new_tokens": max_new_tokens}
    return [
        request(text, [images[0], "What is it?"], name="one", seeds=(1, 2), **sampling),
        request(text, ["Nothing to see, only words. " * 3], name="none", seeds=(3, 4), **sampling),
    ]


def test_nothing_of_the_memory_that_was_given_away_is_used_again(
    engine: VLLMEngine, wide_folder: Path, tmp_path: Path
) -> None:
    models = {version: model_of(wide_folder, random_payload(wide_folder, version), tmp_path) for version in (1, 2)}

    async def story() -> None:
        await engine.load_adapter(random_payload(wide_folder, 1))
        before = await engine.generate(asked(wide_folder))
        running = asyncio.ensure_future(engine.generate(asked(wide_folder, 160)))
        await asyncio.sleep(0.2)
        await engine.sleep()
        assert running.done() and len((await running)[0].samples[0].token_ids) == 160  # it was waited for
        await engine.sleep()  # changes nothing
        waiting = asyncio.ensure_future(engine.generate(asked(wide_folder)))
        await asyncio.sleep(1.0)
        assert not waiting.done()
        await engine.wake()
        await engine.wake()
        assert distances(wide_folder, models, asked(wide_folder), await waiting)[0].largest < 1e-4
        # Prompts that were cached before are computed anew, under a version that came meanwhile as well.
        for first, again in zip(before, await engine.generate(asked(wide_folder)), strict=True):
            for one, other in zip(first.samples, again.samples, strict=True):
                assert one.token_ids.tolist() == other.token_ids.tolist()
        await engine.sleep()
        await engine.load_adapter(random_payload(wide_folder, 2))
        await engine.wake()
        after = await engine.generate(asked(wide_folder))
        assert [answer.policy_version for answer in after] == [2, 2]
        assert distances(wide_folder, models, asked(wide_folder), after)[0].largest < 1e-4

    asyncio.run(story())


def test_a_deadline_while_it_drains_leaves_it_awake(engine: VLLMEngine, wide_folder: Path) -> None:
    async def story() -> None:
        running = asyncio.ensure_future(engine.generate(asked(wide_folder, 200)))
        await asyncio.sleep(0.2)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await engine.sleep()
        assert len(await engine.generate(asked(wide_folder))) == 2  # it takes requests
        await running

    asyncio.run(story())


def test_a_refusal_leaves_it_awake(engine: VLLMEngine, wide_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused() -> None:
        raise RuntimeError("requires a completed pause first")

    async def story() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(engine._llm, "release_kv_cache_memory", refused)
            with pytest.raises(
                EngineError, match="did not give back the memory of keys and values: requires a completed"
            ):
                await engine.sleep()
        assert len(await engine.generate(asked(wide_folder))) == 2
        await engine.sleep()
        await engine.wake()

    asyncio.run(story())
