"""The Serve application as the backend of the HTTP side, with a registry that answers late, fails, or is restarted."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from rl_vlm.http import app as module
from rl_vlm.http.app import ServeBackend
from rl_vlm.serving.client import GenerationFailedError
from rl_vlm.serving.follower import ReplicaState


class Registry:
    """Answers once it is let; `replies` are versions, or errors."""

    def __init__(self, *replies: int | Exception) -> None:
        self.replies, self.asked = list(replies), 0
        self.free = asyncio.Event()
        self.status = SimpleNamespace(remote=self._status)

    async def _status(self) -> dict[str, Any]:
        self.asked += 1
        await self.free.wait()
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        return {"version": reply, "reports": {}, "replicas": ["r"]}


def backend_of(registry: Registry, keeps_base: bool = True) -> ServeBackend:
    return ServeBackend(SimpleNamespace(), registry, "tiny", run_id="run", deadline_s=10.0, keeps_base=keeps_base)


async def names(backend: ServeBackend) -> list[str]:
    return [model.name for model in await backend.models()]


def test_the_first_requests_all_wait_for_the_registry() -> None:
    async def scenario() -> None:
        registry = Registry(3)
        backend = backend_of(registry)
        waiting = [asyncio.create_task(names(backend)) for _ in range(4)]
        await asyncio.sleep(0)
        waiting[0].cancel()  # a client that goes away does not take the answer from the others
        await asyncio.sleep(0)
        registry.free.set()
        assert await asyncio.gather(*waiting[1:]) == [["policy", "policy-v3", "tiny"]] * 3
        assert registry.asked <= 2

    asyncio.run(scenario())


def test_without_an_answer_nothing_is_served_in_place_of_the_adapter() -> None:
    async def scenario() -> None:
        registry = Registry(RayActorError(), 2)
        registry.free.set()
        backend = backend_of(registry)
        with pytest.raises(GenerationFailedError):
            await backend.models()
        await asyncio.sleep(module._REFRESH_S + 0.1)
        assert await names(backend) == ["policy", "policy-v2", "tiny"]

    asyncio.run(scenario())


def test_a_registry_that_was_restarted_does_not_take_a_version_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REFRESH_S", 0.0)

    async def scenario() -> None:
        registry = Registry(2, 0, RayActorError(), 3)
        registry.free.set()
        backend = backend_of(registry)
        found = [(await names(backend))[1] for _ in range(4)]
        assert found == ["policy-v2", "policy-v2", "policy-v2", "policy-v3"]

    asyncio.run(scenario())


def test_many_probes_ask_the_registry_once() -> None:
    async def scenario() -> None:
        registry = Registry(3)
        registry.free.set()
        backend = backend_of(registry)
        await asyncio.gather(*(backend.health() for _ in range(40)))
        assert registry.asked == 1
        backend._known |= {"reports": {"r": {"state": ReplicaState.SUSPECT}}}
        with pytest.raises(GenerationFailedError):
            await backend.health()
        backend._known |= {"replicas": []}
        with pytest.raises(GenerationFailedError):
            await backend.health()

    asyncio.run(scenario())
