"""A replica of a shared service with its real engine and registry, on one event loop: only Ray and Serve are left out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from core_support import adapted_policy, request, run_config
from engine_support import endless, until
from ray import serve
from registry_support import Direct, arrived

from rl_vlm.engines.base import BASE_MODEL, EngineError
from rl_vlm.models.loading import TextSide
from rl_vlm.models.reference import ModelReference
from rl_vlm.models.weights import AdapterPayload
from rl_vlm.serving import deploy
from rl_vlm.serving.deploy import SharedRegistry
from rl_vlm.serving.registry import Published
from rl_vlm.serving.replica import VLMServer
from rl_vlm.types import Completion, GenerationRequest


class Place:
    """A registry and one replica of it."""

    def __init__(self, folder: Path, **dotted: Any) -> None:
        self.run = run_config(folder, serving__shared="s", serving__max_context=512, **dotted)
        model = ModelReference.of(str(folder))
        self.registry = SharedRegistry("s", self.run, model)
        self.replica = VLMServer(model, self.run, "s", "nowhere")
        self.replica._follower._find_registry = lambda: Direct(self.registry)

    async def join(self, policy: str, payload: AdapterPayload | None = None) -> None:
        await self.registry.join(policy)
        if payload is not None:
            await self.publish(policy, payload)

    async def publish(self, policy: str, payload: AdapterPayload) -> None:
        payload = replace(payload, policy=policy)
        assert await self.registry.publish(Published(payload.version, payload.sha256, arrived(payload), policy))

    async def close(self) -> None:
        if self.registry._worker is not None:
            self.registry._worker.cancel()
        await self.replica.__del__()


@pytest.fixture
def make(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="here"))
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(deploy, "deploy_shared", lambda *_: None)
    monkeypatch.setattr(deploy, "_was_restarted", lambda: False)
    yield lambda **dotted: Place(tiny_folder, **dotted)


@pytest.fixture(scope="module")
def payloads(tiny_folder: Path) -> dict[tuple[str, int], AdapterPayload]:
    return {
        (name, version): adapted_policy(tiny_folder, seed=10 * place + version).payload(version)
        for place, name in enumerate("ab")
        for version in (1, 2)
    }


def ask(text: TextSide, policy: str, name: str = "r", **sampling: Any) -> GenerationRequest:
    return replace(request(text, ["Well?"], name=name, **sampling), policy=policy)


def test_calls_and_streams_are_answered_by_the_policy_that_they_name(
    make: Any, text: TextSide, payloads: dict[tuple[str, int], AdapterPayload]
) -> None:
    async def story() -> None:
        place = make()
        replica = place.replica
        said: dict[str, list[int]] = {}
        for policy in "ab":
            await place.join(policy, payloads[policy, 1])
            found = await replica.generate([ask(text, policy, str(k), min_version=1) for k in range(3)])
            assert [answer.request_id for answer in found] == ["0", "1", "2"]
            assert {(one.policy, one.policy_version, one.replica_id) for one in found} == {(policy, 1, "here")}
            said[policy] = found[0].samples[0].token_ids.tolist()
        chunks = [chunk async for chunk in replica.stream(ask(text, "a", min_version=1))]
        assert {chunk.policy_version for chunk in chunks} == {1}
        (base,) = await replica.generate([ask(text, "a", min_version=BASE_MODEL)])
        assert base.policy_version == BASE_MODEL
        with pytest.raises(EngineError, match="two policies"):
            await replica.generate([ask(text, "a"), ask(text, "b")])
        status = await replica.status()
        assert {name: own["version"] for name, own in status["policies"].items()} == {"a": 1, "b": 1}
        assert status["policies"]["a"]["waiting"] == 0
        tally = replica._tally.by_policy
        assert (tally["a"].requests, tally["b"].requests, tally["b"].version) == (5, 3, 1)  # the stream, too
        assert tally["a"].generated_tokens >= len(said["a"])
        replica._metrics.send(replica._tally, replica._engine.stats(), 1)
        await place.close()

    asyncio.run(story())


def test_a_request_waits_for_its_version_and_newer_ones_are_loaded_meanwhile(
    make: Any, text: TextSide, payloads: dict[tuple[str, int], AdapterPayload]
) -> None:
    async def story() -> None:
        place = make()
        await place.join("a", payloads["a", 1])
        early = asyncio.ensure_future(place.replica.generate([ask(text, "a", min_version=2)]))
        (old,) = await place.replica.generate([ask(text, "a", min_version=1)])
        assert old.policy_version == 1 and not early.done()
        await place.publish("a", payloads["a", 2])
        assert (await early)[0].policy_version == 2
        await place.close()

    asyncio.run(story())


def test_a_greedy_policy_leaves_room_for_others(make: Any, text: TextSide) -> None:
    """Its work fills its half of the engine and waits before it; another policy's request passes by."""

    async def story() -> None:
        place = make(serving__sharing__queue_tokens=8000, serving__max_rows=16)
        replica = place.replica
        for policy in ("greedy", "modest"):
            await place.join(policy)
        many = [ask(text, "greedy", str(k), n=4, max_new_tokens=400) for k in range(40)]
        with endless(replica._engine, text):
            work = asyncio.ensure_future(replica.generate(many))
            await until(
                lambda: replica._engine.stats().running >= 4 and bool(replica._gate.queue.waiting().get("greedy"))
            )
            answers: list[Completion] = await asyncio.wait_for(
                replica.generate([ask(text, "modest", max_new_tokens=2)]), 60
            )
            assert answers[0].policy == "modest" and not work.done()
            assert replica._gate.queue.waiting()["greedy"] > 0
            work.cancel()
            await asyncio.wait({work})
        await until(lambda: replica._engine.stats().running == 0)
        assert (replica._gate.queue.inside, replica._gate.queue.waiting()) == (0, {})
        await place.close()

    asyncio.run(story())


def test_a_policy_whose_run_has_left_is_forgotten(
    make: Any, text: TextSide, payloads: dict[tuple[str, int], AdapterPayload]
) -> None:
    async def story() -> None:
        place = make(serving__publish_timeout_s=2.0)
        for policy in "ab":
            await place.join(policy, payloads[policy, 1])
            await place.replica.generate([ask(text, policy, min_version=1)])
        await place.registry.leave("a")
        await until(lambda: set(place.replica._engine._newest) & {"a", "b"} == {"b"})
        assert "a" not in place.replica._tally.by_policy
        with pytest.raises(Exception, match="version 1"):
            await place.replica.generate([ask(text, "a", min_version=1)])
        (answer,) = await place.replica.generate([ask(text, "b", min_version=1)])
        assert answer.policy_version == 1
        with pytest.raises(EngineError):  # an engine's own refusal goes to who asked
            await place.replica.generate([ask(text, "b", max_new_tokens=5000)])
        await place.replica.check_health()
        engine_generate = place.replica._engine.generate

        async def leaving(requests: list[GenerationRequest]) -> list[Completion]:
            found = await engine_generate(requests)
            place.replica._forget(place.replica._follower.policies.pop("b").name)
            return found

        place.replica._engine.generate = leaving
        await place.replica.generate([ask(text, "b", min_version=1)])
        assert not place.replica._tally.by_policy  # an answer after the run has left does not bring its figures back
        await place.close()

    asyncio.run(story())
