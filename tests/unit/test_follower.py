"""A replica goes on following the registry whatever a load raises. The registry and the engine are real, Ray is left out."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from core_support import adapted_policy
from engine_support import until
from http_support import tiny_engine
from loops import in_loop
from registry_support import Direct, arrived

from rl_vlm.engines.base import EngineError
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.models.weights import AdapterPayload
from rl_vlm.serving.follower import Follower, Lifecycle, ReplicaState, ReplicaTally
from rl_vlm.serving.registry import Published, Registry
from rl_vlm.types import POLICY, UserInputError


class Setting:
    """A follower, its engine and its registry on one event loop."""

    def __init__(self, engine: TransformersEngine, *failures: Exception) -> None:
        self.engine, self.failures = engine, list(failures)
        self.registry = Registry()
        self.life = Lifecycle(probe_after_s=10.0, load_patience_s=20.0)
        self.tally = ReplicaTally()
        self.lookups = 0
        self.abandoned = 0
        self._load = engine.load_adapter
        engine.load_adapter = self.load  # type: ignore[method-assign]
        self.follower = Follower(
            "replica",
            engine,
            self.life,
            self.tally,
            find_registry=self.find,
            abandoned=self.abandon,
            load_timeout_s=20.0,
            changed=asyncio.Condition(),
            eager=True,
        )

    def abandon(self) -> None:
        self.abandoned += 1

    async def load(self, payload: AdapterPayload) -> None:
        if self.failures:
            raise self.failures.pop(0)
        await self._load(payload)

    def find(self) -> Direct:
        self.lookups += 1
        if self.lookups == 1:
            raise ValueError("Failed to look up the actor")  # it is being restarted
        return Direct(self.registry)

    @property
    def loaded(self) -> int:
        policy = self.follower.policies.get(POLICY)
        return policy.loaded if policy is not None else 0

    async def publish(self, payload: AdapterPayload) -> None:
        await self.registry.join(POLICY, Published(payload.version, payload.sha256, arrived(payload)))


@pytest.fixture
def engine(tiny_folder: Path) -> Iterator[TransformersEngine]:
    with tiny_engine(tiny_folder) as engine:
        yield engine


@pytest.fixture(scope="module")
def payloads(tiny_folder: Path) -> list[AdapterPayload]:
    return [adapted_policy(tiny_folder, seed=version).payload(version) for version in (1, 2)]


FAILURES = {
    "a full /dev/shm": OSError(errno.ENOSPC, "No space left on device"),
    "a GPU without memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "an engine that refuses": EngineError("vLLM refused adapter version 1"),
    "anything else": KeyError("r"),
}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("when", ["the first load", "a later load"])
@in_loop
async def test_a_load_that_fails_is_tried_again(
    engine: TransformersEngine, payloads: list[AdapterPayload], failure: Exception, when: str
) -> None:
    setting = Setting(engine)
    await setting.registry.join(POLICY)
    if when == "the first load":
        await setting.publish(payloads[0])
    setting.failures = [failure, failure]
    task = asyncio.create_task(setting.follower.run())
    await until(lambda: setting.life.started)
    assert setting.life.state is ReplicaState.SERVING
    await setting.publish(payloads[1])
    await until(lambda: setting.loaded == 2)
    assert (engine.version, setting.failures, setting.life.load_error) == (2, [], "")
    await until(lambda: setting.tally.publish_s > 0)
    assert not task.done()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("failure", [OSError(errno.ENOSPC, "No space left on device"), UserInputError("does not fit")])
@in_loop
async def test_a_replica_that_can_never_load_its_first_adapter_dies_unless_the_adapter_is_at_fault(
    engine: TransformersEngine, payloads: list[AdapterPayload], failure: Exception
) -> None:
    setting = Setting(engine, *[failure] * 1000)
    setting.life.load_patience_s = 0.3
    await setting.publish(payloads[0])
    task = asyncio.create_task(setting.follower.run())
    await until(lambda: len(setting.failures) <= 1000 - 4)
    assert setting.loaded == 0 and not task.done()
    dead = setting.life.state is ReplicaState.DEAD
    assert dead == isinstance(failure, OSError)
    assert not dead or "No space left" in setting.life.death
    task.cancel()


@in_loop
async def test_a_replica_whose_registry_is_gone_for_good_is_abandoned(
    engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:

    monkeypatch.setattr("rl_vlm.serving.follower._ABANDONED_S", 0.5)
    setting = Setting(engine)
    task = asyncio.create_task(setting.follower.run())
    await until(lambda: setting.lookups > 3)
    assert not setting.life.started  # before it knows the newest version of its run
    await setting.registry.join(POLICY)
    await until(lambda: setting.life.started)
    await asyncio.sleep(1)
    assert setting.abandoned == 0  # one lookup failed while it restarted
    task.cancel()

    def gone() -> Direct:
        raise ValueError("Failed to look up the actor")

    setting.follower._find_registry = gone
    task = asyncio.create_task(setting.follower.run())
    await until(lambda: setting.abandoned >= 1)
    assert not task.done()  # Serve ends the replica
    task.cancel()
