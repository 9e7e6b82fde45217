"""Users, replicas and the registry of a shared service on one event loop, without Ray: versions never cross policies."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from core_support import run_config
from engine_support import until
from loops import in_loop
from registry_support import Direct, arrived
from safetensors.numpy import save

from rl_vlm.config import PolicyConfig
from rl_vlm.engines.base import EngineStats
from rl_vlm.models.reference import ModelReference
from rl_vlm.models.weights import AdapterPayload
from rl_vlm.serving import registry, shared
from rl_vlm.serving.counters import ReplicaTally
from rl_vlm.serving.follower import Follower, NotLoadedError
from rl_vlm.serving.health import Lifecycle
from rl_vlm.serving.registry import Published
from rl_vlm.serving.shared import SharedRegistry
from rl_vlm.types import UserInputError


def weights(body: str) -> bytes:
    """A safetensors file of one LoRA matrix that tells what it is."""
    return save({"layer.lora_A.weight": np.frombuffer(body.encode(), np.uint8)})


class Recorder:
    """An engine that has weights and no model: it answers with what it would compute with."""

    def __init__(self) -> None:
        self.newest: dict[str, AdapterPayload] = {}
        self.failures: list[Exception] = []
        self.loads: Counter[str] = Counter()
        self.version = 0

    async def load_adapter(self, payload: AdapterPayload) -> None:
        await asyncio.sleep(random.random() / 500)
        if self.failures:
            raise self.failures.pop()
        self.newest[payload.policy] = payload
        self.loads[payload.policy] += 1

    async def drop_policy(self, policy: str) -> None:
        await asyncio.sleep(0)
        self.newest.pop(policy, None)

    def stats(self) -> EngineStats:
        return EngineStats()


@dataclass
class Replica:
    engine: Recorder
    follower: Follower
    life: Lifecycle
    changed: asyncio.Condition
    task: asyncio.Task[None]

    async def open(self, policy: str, version: int, seconds: float = 10.0) -> None:
        """Return once a request for this version of this policy may start."""
        async with asyncio.timeout(seconds), self.changed:
            await self.changed.wait_for(lambda: self.follower.serves(policy, version))


class World:
    """A registry, replicas that follow it, and tenants."""

    def __init__(self, run: PolicyConfig, model: Path) -> None:
        self.run, self.model = run, ModelReference.of(str(model))
        self.skipped_s = 0.0  # by which the registry's clock is ahead
        self.kept: list[bool] = []  # for each deployment, whether an application that was there was kept
        self.restarted = False  # the actor, by Ray
        self.gone: list[str] = []
        for module in (registry, shared):  # put back by the fixture
            module.time = SimpleNamespace(monotonic=self.now)  # type: ignore[attr-defined]
        self.registry = self._registry()
        self.replicas: list[Replica] = []

    def now(self) -> float:
        return time.monotonic() + self.skipped_s

    def _registry(self) -> SharedRegistry:
        return SharedRegistry("test", self.run, self.model)

    def restart_registry(self) -> None:
        """As after a kill: it knows nobody."""
        if self.registry._worker is not None:
            self.registry._worker.cancel()
        self.registry = self._registry()

    def add_replica(self) -> None:
        engine, life, name = Recorder(), Lifecycle(probe_after_s=10.0), f"replica {len(self.replicas)}"
        changed = asyncio.Condition()
        follower = Follower(
            name, engine, life, ReplicaTally(), find_registry=lambda: Direct(self.registry), load_timeout_s=10.0,
            abandoned=lambda: self.gone.append(name), changed=changed, eager=False,
        )  # type: ignore[arg-type]  # fmt: skip
        self.replicas.append(Replica(engine, follower, life, changed, asyncio.create_task(follower.run())))

    async def join(self, policy: str, newest: Published | None = None) -> int:
        home = await self.registry.join(policy, newest, self.run, self.model.digest)
        assert isinstance(home, int), home
        return home

    def version(self, policy: str, version: int, body: str) -> Published:
        tensors, config = weights(body), '{"peft_type": "LORA", "r": 8, "lora_alpha": 16}'
        payload = AdapterPayload(version, tensors, config, sha256(tensors).hexdigest(), policy)
        return Published(version, payload.sha256, arrived(payload), policy)

    async def publish(self, policy: str, version: int, body: str) -> bool:
        return await self.registry.publish(self.version(policy, version, body))

    async def close(self) -> None:
        tasks = [replica.task for replica in self.replicas]
        tasks += [self.registry._worker] if self.registry._worker else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def world(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """How to make one; what Ray and Serve would do is noted."""

    @asynccontextmanager
    async def make(replicas: int = 2, **dotted: Any) -> AsyncIterator[World]:
        run = run_config(tiny_folder, serving__shared="test", **dotted)
        for module in (registry, shared):
            monkeypatch.setattr(module, "time", time)
        found = World(run, tiny_folder)
        monkeypatch.setattr(shared, "deploy_shared", lambda m, r, run_id, keep: found.kept.append(keep))
        monkeypatch.setattr(shared, "_was_restarted", lambda: found.restarted)
        monkeypatch.setattr(shared, "delete_application", found.gone.append)
        context = SimpleNamespace(current_actor="itself")
        ended = SimpleNamespace(
            kill=lambda actor, no_restart: found.gone.append(actor), get_runtime_context=lambda: context
        )
        monkeypatch.setattr(shared, "ray", ended)
        for name, seconds in {
            "_TICK_S": 0.01,
            "_LINGER_S": 0.05,
            "_REPORT_FAILURE_S": 0.05,
        }.items():
            monkeypatch.setattr(shared, name, seconds)
        monkeypatch.setattr(registry, "POLL_S", 0.2)
        for _ in range(replicas):
            found.add_replica()
        try:
            yield found
        finally:
            await found.close()

    return make


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
@in_loop
async def test_versions_never_cross_policies(world: Any, seed: int) -> None:
    """Tenants come, publish, ask, leave, crash, and come again after their lease has ended; registry and replicas die in between."""
    chosen = random.Random(seed)
    checked: Counter[str] = Counter()

    async def ask(replica: Replica, policy: str, version: int, bodies: dict[Any, str], alive: set[str]) -> None:
        wanted = chosen.choice([version, max(version - 1, 0)])
        try:
            await replica.open(policy, wanted)
        except TimeoutError as error:
            assert policy not in alive or replica.task.done(), error
            return
        payload = replica.engine.newest.get(policy)  # no await in between: what a request would start with
        if payload is None:
            assert wanted == 0 and version <= 1, (policy, wanted)
            return
        assert bytes(payload.tensors) == weights(bodies[policy, payload.version])
        assert payload.version >= wanted
        checked[policy] += 1

    async with world() as place:
        await place.join("keeper")
        tenants: dict[str, tuple[str, Published | None]] = {}
        bodies: dict[tuple[str, int], str] = {}
        alive: set[str] = set()
        asked: list[tuple[str, Replica, asyncio.Task[None]]] = []
        for step in range(800):
            action = chosen.choice(
                ["join", "publish", "publish", "ask", "ask", "ask", "leave", "crash", "kill", "wait"]
            )
            name = chosen.choice("abcd")
            policy, newest = tenants.get(name, ("", None))
            version = newest.version if newest else 0
            if action == "join" and not policy:
                tenants[name] = (f"{name}{step}", None)
                await place.join(f"{name}{step}")
                alive.add(f"{name}{step}")
            elif action == "publish" and policy:
                bodies[policy, version + 1] = f"{name} {step}"
                newest = place.version(policy, version + 1, f"{name} {step}")
                assert await place.registry.publish(newest)
                tenants[name] = (policy, newest)
            elif action == "ask" and policy:
                replica = chosen.choice(place.replicas)
                task = asyncio.create_task(ask(replica, policy, version, bodies, alive))
                asked.append((policy, replica, task))
            elif action in ("leave", "crash") and policy and chosen.random() < 0.3:
                await place.registry.leave(policy)
                if action == "crash" and version and chosen.random() < 0.5:  # it was only slow
                    assert not await place.registry.renew(policy)
                    await place.join(policy, newest)
                else:
                    alive.discard(policy)
                    del tenants[name]
            elif action == "kill" and chosen.random() < 0.3:
                if chosen.random() < 0.5:
                    place.restart_registry()
                    await place.join("keeper")
                    for policy, newest in tenants.values():
                        assert not await place.registry.renew(policy)
                        await place.join(policy, newest)
                else:
                    chosen.choice(place.replicas).task.cancel()
                    place.replicas = [r for r in place.replicas if not r.task.cancelling()]
                    place.add_replica()
            elif action == "wait":
                await asyncio.sleep(0.005)
        for policy, replica, task in asked:
            if policy not in alive or replica.task.done():
                task.cancel()  # they wait for what will not come
            else:
                await asyncio.wait_for(task, 20)
    assert sum(checked.values()) >= 20


@in_loop
async def test_what_nobody_asks_for_is_not_loaded_and_what_is_in_use_is_loaded_ahead(world: Any) -> None:
    async with world() as place:
        policies = [f"p{number}" for number in range(8)]
        assert [await place.join(policy) for policy in policies] == list(range(8))
        for version in (1, 2, 3):
            for policy in policies:
                assert await place.publish(policy, version, f"{policy} {version}")
        first, second = place.replicas
        await first.open("p3", 2)
        await asyncio.sleep(0.05)
        assert first.engine.loads == {"p3": 1} and not second.engine.loads
        await first.open("p3", 3)
        assert await place.publish("p3", 4, "p3 4")
        await until(lambda: first.follower.policies["p3"].loaded == 4)
        async with asyncio.timeout(10):
            while (report := await place.registry.acknowledged("p3")) is None or report.version < 4:
                await asyncio.sleep(0.005)
        assert list(report.acked) == ["replica 0"]
        assert await place.registry.acknowledged("p1") is None


@in_loop
async def test_a_wrong_adapter_is_its_own_runs_affair(world: Any) -> None:
    async with world(replicas=1) as place:
        for policy in "ab":
            await place.join(policy)
        (replica,) = place.replicas
        replica.life.load_patience_s = 0.0  # the first failure that may be the replica's own kills it
        replica.engine.failures = [UserInputError("does not fit")]
        assert await place.publish("a", 1, "a") and await place.publish("b", 1, "b")
        with pytest.raises(NotLoadedError):
            await replica.open("a", 1)
        await replica.open("b", 1)
        await until(lambda: _serves(replica, "a", 1))  # a later request tries again
        assert not replica.life.death
        replica.engine.failures = [OSError("disk full")]
        assert await place.publish("a", 2, "a2")
        with pytest.raises(NotLoadedError):
            await replica.open("a", 2)
        assert "disk full" in replica.life.death


def _serves(replica: Replica, policy: str, version: int) -> bool:
    with suppress(NotLoadedError):
        return replica.follower.serves(policy, version)
    return False


@in_loop
async def test_a_restarted_registry_does_not_end_the_service_where_deploying_fails_once(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world() as here:
        await here.join("a")
        await until(lambda: here.kept)
        here.restart_registry()
        here.restarted = True
        await here.join("a")
        failures = [RuntimeError("Serve's controller is busy")]

        def failing_once(model: Any, run: Any, run_id: str, keep: bool) -> None:
            if failures:
                raise failures.pop()
            here.kept.append(keep)

        monkeypatch.setattr(shared, "deploy_shared", failing_once)
        await until(lambda: here.kept == [False, True])
        assert not failures and not here.gone and not here.registry._closing


@in_loop
async def test_bytes_that_never_come_keep_no_other_policy_waiting(world: Any) -> None:
    async with world(replicas=1) as place:
        for policy in "ab":
            await place.join(policy)
        lost: Any = asyncio.get_running_loop().create_future()  # of a run whose node is cut off
        assert await place.registry.publish(Published(1, "hash", lost, "a"))
        assert await place.publish("b", 1, "b")
        (replica,) = place.replicas
        waiting = asyncio.create_task(replica.open("a", 1))
        await until(lambda: "a" in replica.follower.policies)
        await until(lambda: replica.follower.policies["a"].loading is not None)
        await replica.open("b", 1, 5)
        assert not waiting.done() and not replica.life.death
        waiting.cancel()


@in_loop
async def test_a_restarted_registry_drops_nobody_who_joins_again(world: Any) -> None:
    """Replicas keep what they have, and requests wait, until every tenant had the time to join again."""
    async with world(replicas=1) as place:
        (replica,) = place.replicas
        for policy in "ab":
            await place.join(policy)
            assert await place.publish(policy, 1, policy)
            await replica.open(policy, 1)
        await until(lambda: place.kept == [False])  # what another service left over has another model
        waiting = asyncio.create_task(replica.open("a", 2))
        place.restarted = True
        place.restart_registry()
        await until(lambda: place.kept[1:] == [True])  # which a replica's question sets off
        assert replica.engine.newest.keys() == {"a", "b"} and not waiting.done()
        await place.join("a", place.version("a", 2, "a 2"))
        await asyncio.wait_for(waiting, 5)
        for _ in range(2):  # b does not come again
            place.skipped_s += 0.6 * place.run.serving.sharing.lease_s
            assert await place.registry.renew("a")
        await until(lambda: replica.engine.newest.keys() == {"a"})
        await place.join("c")
        await until(lambda: "c" in replica.follower.policies)
        await place.registry.leave("c")
        await until(lambda: "c" not in replica.follower.policies)


@in_loop
async def test_a_registry_that_was_stopped_blames_nobody_for_its_own_silence(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world(replicas=0) as place:
        monkeypatch.setattr(shared, "_STALL_S", 0.2)
        place.registry._lease_s = 1.0
        await place.join("a")
        await asyncio.sleep(0.05)
        time.sleep(1.5)  # as SIGSTOP does; a's calls wait meanwhile
        await asyncio.sleep(0.05)
        assert await place.registry.renew("a")
        place.skipped_s += 2.0
        await until(lambda: not len(place.registry._tenants))  # of its own silence it is collected
