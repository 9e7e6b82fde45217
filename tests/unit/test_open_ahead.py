"""Episodes that are opened, and images that are encoded, before the policy is asked."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from core_support import picture, request, text_side
from engine_support import until
from test_client import Handle, client_of

from rl_vlm.config import PolicyConfig
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.envs.errors import EnvError
from rl_vlm.rollout.env_runner import RolloutWorker
from rl_vlm.rollout.tasks import RolloutResult, RolloutTask
from rl_vlm.types import Completion, EncodedImage, GenerationRequest
from rl_vlm.zoo.shapes.environment import ShapesEnv


class Direct:
    """A client that asks an engine in this process."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine = engine
        self.retries = 0
        self.announced: list[str] = []

    async def generate(self, asked: GenerationRequest) -> Completion:
        return dataclasses.replace((await self.engine.generate([asked]))[0], replica_id="here")

    async def encode_images(self, images: Sequence[Sequence[EncodedImage]]) -> None:
        self.announced += [image.sha256 for entry in images for image in entry]
        self.engine.encode_images([image for entry in images for image in entry])


@pytest.fixture
def engine(tiny_folder: Path) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(tiny_folder, max_context=512)
    yield engine
    asyncio.run(engine.close())


@pytest.fixture
def resets(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The items that environments were opened with."""
    opened: list[int] = []
    reset = ShapesEnv.reset

    def note(self: ShapesEnv, **more: Any) -> Any:
        opened.append(more["options"]["index"])
        return reset(self, **more)

    monkeypatch.setattr(ShapesEnv, "reset", note)
    return opened


def worker_of(engine: TransformersEngine, folder: Path) -> tuple[RolloutWorker, Direct]:
    run = PolicyConfig.model_validate({"env": {"id": "Shapes-v0"}, "rollout": {"group_size": 2, "group_retries": 0}})
    worker, client = RolloutWorker(run, "run", folder), Direct(engine)
    worker._client = client  # type: ignore[assignment]
    return worker, client


def tasks(first: int, count: int = 3) -> list[RolloutTask]:
    return [
        RolloutTask(f"{k:06d}", k, "train", seed=k, sampling_seed=100 + k, size=2, temperature=1.0, min_version=0)
        for k in range(first, first + count)
    ]


def in_loop(work: Callable[[], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with asyncio.timeout(240):
            return await work()

    return asyncio.run(run())


def sampled(result: RolloutResult) -> list[tuple[str, list[int], list[float]]]:
    return [(t.trajectory_id, t.token_ids.tolist(), t.logprobs.tolist()) for g in result.groups for t in g.trajectories]


def test_groups_are_the_same_and_open_once(engine: TransformersEngine, tiny_folder: Path, resets: list[int]) -> None:
    plain, _ = worker_of(engine, tiny_folder)
    ahead, client = worker_of(engine, tiny_folder)

    async def run() -> None:
        expected = await plain.run(tasks(0))
        resets.clear()
        await ahead.open_ahead(tasks(0))
        assert sorted(resets) == [0, 0, 1, 1, 2, 2]
        shown = [t.images[0].sha256 for g in expected.groups for t in g.trajectories[:1]]
        assert sorted(client.announced) == sorted(shown)
        result = await ahead.run([dataclasses.replace(task, min_version=0) for task in tasks(0)])
        assert len(resets) == 6  # not once more
        found, wanted = sampled(result), sampled(expected)
        assert [one[:2] for one in found] == [one[:2] for one in wanted]
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one[2], other[2], atol=1e-5)

    in_loop(run)


def test_images_are_encoded_when_the_engine_is_idle(engine: TransformersEngine, tiny_folder: Path) -> None:
    text, rng = text_side(tiny_folder), np.random.default_rng(0)
    asked = [request(text, [picture(rng, 64, 64), "What?"], name=str(k), max_new_tokens=4) for k in range(20)]

    async def run() -> None:
        engine.encode_images([image for one in asked for image in one.images])
        await until(lambda: engine.stats().image_cache_misses == 20)
        await engine.generate(asked)
        assert engine.stats().image_cache_misses == 20 and engine.stats().image_cache_hits == 20

    in_loop(run)


def test_a_damaged_image_is_told_to_the_request_that_shows_it(engine: TransformersEngine, tiny_folder: Path) -> None:
    text = text_side(tiny_folder)
    good = request(text, [picture(np.random.default_rng(0), 64, 64), "What?"], max_new_tokens=4)
    broken = dataclasses.replace(good.images[0], png=good.images[0].png[:40], sha256="0" * 64)

    async def run() -> None:
        engine.encode_images([broken])
        await until(lambda: not engine._upcoming)
        assert len(await engine.generate([good])) == 1
        assert not engine.dead

    in_loop(run)


def test_replicas_are_told_what_their_requests_will_show() -> None:
    images = [picture(np.random.default_rng(k), 32, 32) for k in range(3)]
    handle = Handle("a", "b")
    in_loop(lambda: client_of(handle).encode_images([[images[0]], [images[1]], [images[2]]]))
    assert [session for session, _ in handle.calls] == ["#0", "#1"]
    assert [calls for _, calls in handle.calls] == [[images[0], images[2]], [images[1]]]


def test_what_fails_ahead_is_left_to_the_round_that_counts_it(
    engine: TransformersEngine, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, client = worker_of(engine, tiny_folder)
    reset = ShapesEnv.reset

    def fail(self: ShapesEnv, **more: Any) -> Any:
        if more["options"]["index"] == 1:
            raise EnvError("broken")
        return reset(self, **more)

    monkeypatch.setattr(ShapesEnv, "reset", fail)

    async def run() -> None:
        await worker.open_ahead(tasks(0))
        assert len(client.announced) == 2
        result = await worker.run(tasks(0))
        assert [group.index for group in result.groups] == [0, 2]
        assert result.lost == {"000001": "broken"} and result.dropped == {"env": 1}

    in_loop(run)
