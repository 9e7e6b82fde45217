"""A replica of a shared service with its real engine and registry, on one event loop: only Ray and Serve are left out."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from core_support import adapted_policy, request, run_config, text_side
from engine_support import endless, until
from ray import serve
from registry_support import Direct, arrived

from rl_vlm.engines.base import BASE_MODEL, EngineError
from rl_vlm.models.adapter import AdapterPayload
from rl_vlm.models.loading import TextSide
from rl_vlm.models.reference import ModelReference
from rl_vlm.serving import deploying, shared_registry
from rl_vlm.serving.policy_key import PolicyKey, PolicyRefusedError
from rl_vlm.serving.shared_registry import SharedRegistry
from rl_vlm.serving.shared_server import SharedVLMServer
from rl_vlm.serving.terms import Terms
from rl_vlm.serving.version_line import Published, VersionLine
from rl_vlm.types import Completion, GenerationRequest


class Place:
    """A registry and one replica of it."""

    def __init__(self, folder: Path, scratch: Path, **dotted: Any) -> None:
        self.run = run_config(folder, serving__shared="s", serving__max_context=512, **dotted)
        model = ModelReference.of(str(folder))
        self.terms = Terms.of(self.run, model.digest)
        make_line = partial(VersionLine, put=arrived)
        self.registry = SharedRegistry("s", self.run, model, str(scratch), make_line)
        self.replica = SharedVLMServer(model, self.run, "s", "nowhere")
        self.replica._shelf._find_registry = lambda: Direct(self.registry)

    async def join(self, policy: str, payload: AdapterPayload | None = None) -> PolicyKey:
        key = PolicyKey.new(policy)
        await self.registry.join(policy, key.token, self.terms)
        if payload is not None:
            await self.publish(key, payload)
        return key

    async def publish(self, key: PolicyKey, payload: AdapterPayload) -> None:
        payload = replace(payload, policy=key.policy)
        assert await self.registry.publish(
            Published(payload.version, payload.sha256, arrived(payload), key.policy), key.token
        )

    async def close(self) -> None:
        if self.registry._worker is not None:
            self.registry._worker.cancel()
        await self.replica.__del__()


@pytest.fixture
def make(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    context = SimpleNamespace(replica_id=SimpleNamespace(unique_id="here"))
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(deploying, "deploy_shared", lambda *_: None)
    monkeypatch.setattr(shared_registry, "_was_restarted", lambda: False)
    yield lambda **dotted: Place(tiny_folder, tmp_path / "registry", **dotted)


@pytest.fixture(scope="module")
def text(tiny_folder: Path) -> TextSide:
    return text_side(tiny_folder)


@pytest.fixture(scope="module")
def payloads(tiny_folder: Path) -> dict[tuple[str, int], AdapterPayload]:
    return {
        (name, version): adapted_policy(tiny_folder, seed=10 * place + version).payload(version)
        for place, name in enumerate("ab")
        for version in (1, 2)
    }


def ask(text: TextSide, policy: str, name: str = "r", **sampling: Any) -> GenerationRequest:
    return replace(request(text, ["Well?"], name=name, **sampling), policy=policy)


def test_calls_streams_and_images_need_the_token_of_their_policy(
    make: Any, text: TextSide, payloads: dict[tuple[str, int], AdapterPayload]
) -> None:
    async def story() -> None:
        place = make()
        replica = place.replica
        a, b = [await place.join(name, payloads[name, 1]) for name in "ab"]
        said: dict[str, list[int]] = {}
        for key in (a, b):
            found = await replica.generate(
                [ask(text, key.policy, str(k), min_version=1) for k in range(3)], key.policy, key.token
            )
            assert [answer.request_id for answer in found] == ["0", "1", "2"]
            assert {(one.policy, one.policy_version, one.replica_id) for one in found} == {(key.policy, 1, "here")}
            said[key.policy] = found[0].samples[0].token_ids.tolist()
        chunks = [chunk async for chunk in replica.stream(ask(text, "a", min_version=1), "a", a.token)]
        assert {chunk.policy_version for chunk in chunks} == {1}

        async def streamed() -> None:
            async for _ in replica.stream(ask(text, "a"), "a", b.token):
                pass

        for refused in (
            replica.generate([ask(text, "a")], "a", b.token),
            replica.generate([ask(text, "a", min_version=BASE_MODEL)], "a", ""),
            replica.encode_images([], "a", b.token),
            streamed(),
        ):
            with pytest.raises(PolicyRefusedError, match="does not open policy 'a'"):
                await refused
        for requests in ([ask(text, "b")], [ask(text, "a"), ask(text, "b")]):
            with pytest.raises(PolicyRefusedError, match="requests of no other"):
                await replica.generate(requests, "a", a.token)
        status = await replica.status()
        assert status["refused"] == 4
        assert {name: own["version"] for name, own in status["policies"].items()} == {"a": 1, "b": 1}
        assert status["policies"]["a"]["waiting"] == 0
        tally = replica._tally.by_policy
        assert (tally["a"].requests, tally["b"].requests, tally["b"].version) == (4, 3, 1)  # the stream, too
        assert tally["a"].generated_tokens >= len(said["a"])
        replica._metrics.send(replica._tally, replica._engine.stats(), 1)
        await place.close()

    asyncio.run(story())


def test_a_request_waits_for_its_version_and_newer_ones_are_loaded_meanwhile(
    make: Any, text: TextSide, payloads: dict[tuple[str, int], AdapterPayload]
) -> None:
    async def story() -> None:
        place = make()
        key = await place.join("a", payloads["a", 1])
        early = asyncio.ensure_future(place.replica.generate([ask(text, "a", min_version=2)], "a", key.token))
        (old,) = await place.replica.generate([ask(text, "a", min_version=1)], "a", key.token)
        assert old.policy_version == 1 and not early.done()
        await place.publish(key, payloads["a", 2])
        assert (await early)[0].policy_version == 2
        await place.close()

    asyncio.run(story())


def test_a_greedy_policy_leaves_room_for_others(make: Any, text: TextSide) -> None:
    """Its work fills its half of the engine and waits before it; another policy's request passes by."""

    async def story() -> None:
        place = make(serving__sharing__queue_tokens=8000, serving__max_rows=16)
        replica = place.replica
        greedy, modest = [await place.join(name) for name in ("greedy", "modest")]
        many = [ask(text, "greedy", str(k), n=4, max_new_tokens=400) for k in range(40)]
        with endless(replica._engine, text):
            work = asyncio.ensure_future(replica.generate(many, "greedy", greedy.token))
            await until(
                lambda: replica._engine.stats().running >= 4 and bool(replica._gate.queue.waiting().get("greedy"))
            )
            answers: list[Completion] = await asyncio.wait_for(
                replica.generate([ask(text, "modest", max_new_tokens=2)], "modest", modest.token), 60
            )
            assert answers[0].policy == "modest" and not work.done()
            assert replica._gate.queue.waiting()["greedy"] > 0
            work.cancel()
            await asyncio.wait({work})
        await until(lambda: replica._engine.stats().running == 0)
        assert (replica._gate.queue.inside, replica._gate.queue.waiting()) == (0, {})
        await place.close()

    asyncio.run(story())


def test_a_policy_whose_run_has_left_is_refused_and_forgotten(
    make: Any, text: TextSide, payloads: dict[tuple[str, int], AdapterPayload]
) -> None:
    async def story() -> None:
        place = make(serving__publish_timeout_s=2.0)
        a, b = [await place.join(name, payloads[name, 1]) for name in "ab"]
        for key in (a, b):
            await place.replica.generate([ask(text, key.policy, min_version=1)], key.policy, key.token)
        await place.registry.leave("a", a.token)
        await until(lambda: set(place.replica._engine._newest_of) & {"a", "b"} == {"b"})
        assert "a" not in place.replica._tally.by_policy
        with pytest.raises(Exception, match="did not get version 1 of policy a"):
            await place.replica.generate([ask(text, "a", min_version=1)], "a", a.token)
        (answer,) = await place.replica.generate([ask(text, "b", min_version=1)], "b", b.token)
        assert answer.policy_version == 1
        with pytest.raises(EngineError):  # an engine's own refusal goes to who asked
            await place.replica.generate([ask(text, "b", max_new_tokens=5000)], "b", b.token)
        await place.replica.check_health()
        engine_generate = place.replica._engine.generate

        async def leaving(requests: list[GenerationRequest]) -> list[Completion]:
            found = await engine_generate(requests)
            place.replica._forget(place.replica._shelf.policies.pop("b").name)
            return found

        place.replica._engine.generate = leaving
        await place.replica.generate([ask(text, "b", min_version=1)], "b", b.token)
        assert not place.replica._tally.by_policy  # an answer after the run has left does not bring its figures back
        await place.close()

    asyncio.run(story())
