"""Users, replicas and the registry of a shared service on one event loop, without Ray: versions never cross policies."""

from __future__ import annotations

import asyncio
import random
import shutil
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from core_support import run_config
from registry_support import Direct, arrived
from safetensors.numpy import save

from rl_vlm.config import RunConfig
from rl_vlm.engines.base import EngineStats
from rl_vlm.models.adapter import AdapterPayload
from rl_vlm.models.reference import ModelReference
from rl_vlm.serving import deploying, follower, members, shared_registry
from rl_vlm.serving.lifecycle import Lifecycle
from rl_vlm.serving.members import Members
from rl_vlm.serving.metrics import ReplicaTally
from rl_vlm.serving.policy_key import PolicyKey, PolicyRefusedError
from rl_vlm.serving.shared_registry import SharedRegistry
from rl_vlm.serving.shared_types import Welcome
from rl_vlm.serving.shelf import NotLoadedError, PolicyShelf
from rl_vlm.serving.terms import Terms
from rl_vlm.serving.version_line import Published, VersionLine
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
    shelf: PolicyShelf
    life: Lifecycle
    task: asyncio.Task[None]


class World:
    """A registry in a folder, replicas that follow it, and users."""

    def __init__(self, run: RunConfig, model: Path, folder: Path) -> None:
        self.run, self.model, self.folder = run, ModelReference.of(str(model)), folder
        self.terms = Terms.of(run, self.model.digest)
        self.skipped_s = 0.0  # by which the registry's clock is ahead
        self.deployed: list[int] = []
        self.how: list[str] = []  # what was to become of an application that is there
        self.restarted = False  # the actor, by Ray
        self.gone: list[str] = []
        shared_registry.time = SimpleNamespace(monotonic=self.now)  # type: ignore[attr-defined]  # put back by the fixture
        self.registry = self._registry()
        self.replicas: list[Replica] = []

    def deploy(self, count: int, how: str) -> None:
        self.deployed.append(count)
        self.how.append(how)

    def now(self) -> float:
        return time.monotonic() + self.skipped_s

    def _registry(self) -> SharedRegistry:
        return SharedRegistry("test", self.run, self.model, str(self.folder), partial(VersionLine, put=arrived))

    def restart_registry(self) -> None:
        """As after a kill: what is not on disk is lost."""
        if self.registry._worker is not None:
            self.registry._worker.cancel()
        self.registry = self._registry()

    def add_replica(self) -> None:
        engine, life, name = Recorder(), Lifecycle(probe_after_s=10.0), f"replica {len(self.replicas)}"
        shelf = PolicyShelf(
            name, engine, life, ReplicaTally(), find_registry=lambda: Direct(self.registry), load_timeout_s=10.0,
            abandoned=lambda: self.gone.append(name), notify=lambda: asyncio.sleep(0),
        )  # type: ignore[arg-type]  # fmt: skip
        self.replicas.append(Replica(engine, shelf, life, asyncio.create_task(shelf.run())))

    async def join(self, policy: str, **changes: Any) -> PolicyKey:
        key = PolicyKey.new(policy)
        answer = await self.registry.join(policy, key.token, self.terms, **changes)
        assert isinstance(answer, Welcome), answer
        return replace(key, seat=answer.seat)

    async def publish(self, key: PolicyKey, version: int, body: str) -> bool:
        tensors, config = weights(body), '{"peft_type": "LORA", "r": 8, "lora_alpha": 16}'
        payload = AdapterPayload(version, tensors, config, sha256(tensors).hexdigest(), key.policy)
        published = Published(version, payload.sha256, arrived(payload), key.policy)
        return await self.registry.publish(published, key.token)

    async def close(self) -> None:
        tasks = [replica.task for replica in self.replicas]
        tasks += [self.registry._worker] if self.registry._worker else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def world(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """How to make one; what Ray and Serve would do is noted."""

    @asynccontextmanager
    async def make(replicas: int = 2, **dotted: Any) -> AsyncIterator[World]:
        run = run_config(tiny_folder, serving__shared="test", **dotted)
        monkeypatch.setattr(shared_registry, "time", time)
        found = World(run, tiny_folder, tmp_path / "registry")
        monkeypatch.setattr(deploying, "deploy_shared", lambda m, r, name, count, how: found.deploy(count, how))
        monkeypatch.setattr(shared_registry, "_was_restarted", lambda: found.restarted)
        monkeypatch.setattr(deploying, "delete_shared", found.gone.append)
        context = SimpleNamespace(current_actor="itself")
        ended = SimpleNamespace(
            kill=lambda actor, no_restart: found.gone.append(actor), get_runtime_context=lambda: context
        )
        monkeypatch.setattr(shared_registry, "ray", ended)
        for name, seconds in {
            "_TICK_S": 0.01,
            "_LINGER_S": 0.05,
            "_FEWER_AFTER_S": 0.05,
            "POLL_S": 0.2,
            "_TELL_S": 0.05,
        }.items():
            monkeypatch.setattr(shared_registry, name, seconds)
        for _ in range(replicas):
            found.add_replica()
        try:
            yield found
        finally:
            await found.close()

    return make


async def until(condition: Any, seconds: float = 20.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("seed", range(12))
def test_versions_never_cross_policies(world: Any, seed: int) -> None:
    """Users come, publish, ask, leave, crash, and come again after their lease has ended; registry and replicas die in between."""
    chosen = random.Random(seed)
    checked: Counter[str] = Counter()

    async def ask(
        replica: Replica, key: PolicyKey, version: int, bodies: dict[tuple[str, int], str], alive: set[str]
    ) -> None:
        wanted = chosen.choice([version, max(version - 1, 0)])
        try:
            await replica.shelf.open(key.policy, key.token, wanted)
        except (PolicyRefusedError, TimeoutError) as error:
            assert key.token not in alive or replica.task.done(), error
            return
        payload = replica.engine.newest.get(key.policy)  # no await in between: what a request would start with
        if payload is None:
            assert wanted == 0 and version <= 1, (key, wanted)
            return
        assert bytes(payload.tensors) == weights(bodies[key.token, payload.version])
        assert payload.version >= wanted
        checked[key.policy] += 1

    async def story() -> None:
        async with world() as place:
            await place.join("keeper", keeper=True)
            users: dict[str, tuple[PolicyKey, int]] = {}
            bodies: dict[tuple[str, int], str] = {}
            alive: set[str] = set()
            asked: list[tuple[PolicyKey, Replica, asyncio.Task[None]]] = []
            for step in range(500):
                action = chosen.choice(
                    ["join", "publish", "publish", "ask", "ask", "ask", "leave", "crash", "kill", "wait"]
                )
                name = chosen.choice("abcd")
                if action == "join" and name not in users:
                    users[name] = (await place.join(f"{name}{step}"), 0)
                    alive.add(users[name][0].token)
                elif action == "publish" and name in users:
                    key, version = users[name]
                    bodies[key.token, version + 1] = f"{name} {step}"
                    assert await place.publish(key, version + 1, f"{name} {step}")
                    users[name] = (key, version + 1)
                elif action == "ask" and name in users:
                    replica = chosen.choice(place.replicas)
                    task = asyncio.create_task(ask(replica, *users[name], bodies, alive))
                    asked.append((users[name][0], replica, task))
                elif action in ("leave", "crash") and name in users and chosen.random() < 0.3:
                    key, version = users.pop(name)
                    alive.discard(key.token)
                    if action == "leave":
                        await place.registry.leave(key.policy, key.token)
                    else:
                        member = place.registry._members.opened(key.policy, key.token)
                        assert member is not None
                        place.registry._members.remove(member, 0.0)
                        if version and chosen.random() < 0.5:  # it was only slow
                            assert not await place.registry.renew(key.policy, key.token)
                            again = await place.registry.join(key.policy, key.token, place.terms)
                            assert isinstance(again, Welcome)
                            assert await place.publish(key, version, bodies[key.token, version])
                            users[name] = (key, version)
                            alive.add(key.token)
                elif action == "kill" and chosen.random() < 0.3:
                    if chosen.random() < 0.5:
                        place.restart_registry()
                    else:
                        chosen.choice(place.replicas).task.cancel()
                        place.replicas = [r for r in place.replicas if not r.task.cancelling()]
                        place.add_replica()
                elif action == "wait":
                    await asyncio.sleep(0.005)
            for key, replica, task in asked:
                if key.token not in alive or replica.task.done():
                    task.cancel()  # they wait for what will not come
                else:
                    await asyncio.wait_for(task, 20)

    asyncio.run(story())
    assert sum(checked.values()) >= 20


def test_a_token_opens_its_own_policy_only(world: Any) -> None:
    async def story() -> None:
        async with world() as place:
            a, b = await place.join("a"), await place.join("b")
            for key in (a, b):
                assert await place.publish(key, 1, key.policy)
            shelf = place.replicas[0].shelf
            await shelf.open("a", a.token, 1)
            for token in (b.token, "", a.token + "x", a.lock):
                with pytest.raises(PolicyRefusedError, match="does not open policy 'a'"):
                    await shelf.open("a", token, -1)
                assert not await place.registry.publish(Published(9, "h", None, "a"), token)  # type: ignore[arg-type]
                assert not await place.registry.renew("a", token)
                await place.registry.leave("a", token)
            assert (await place.registry.status())["policies"].keys() == {"a", "b"}
            await place.registry.leave("a", a.token)
            refused = await place.registry.join("a", b.token, place.terms)
            assert isinstance(refused, str) and "of another run" in refused
            assert isinstance(await place.registry.join("a", a.token, place.terms), Welcome)
            assert a.token not in repr(a) and a.token not in (place.folder / "members.json").read_text()
            assert place.replicas[0].shelf._tally.refused == 4

    asyncio.run(story())


def test_what_nobody_asks_for_is_not_loaded_and_what_is_in_use_is_loaded_ahead(world: Any) -> None:
    async def story() -> None:
        async with world() as place:
            keys = [await place.join(f"p{number}") for number in range(8)]
            assert [key.seat for key in keys] == list(range(8))
            for version in (1, 2, 3):
                for key in keys:
                    assert await place.publish(key, version, f"{key.policy} {version}")
            await place.replicas[0].shelf.open("p3", keys[3].token, 2)
            await asyncio.sleep(0.05)
            assert place.replicas[0].engine.loads == {"p3": 1} and not place.replicas[1].engine.loads
            # It was asked for before its load had begun; now it is in use.
            await place.replicas[0].shelf.open("p3", keys[3].token, 3)
            assert await place.publish(keys[3], 4, "p3 4")
            await until(lambda: place.replicas[0].shelf.policies["p3"].loaded == 4)
            await until(lambda: place.registry._members.opened("p3", keys[3].token).line.acks(4))
            report = await place.registry.acknowledged("p3", keys[3].token)
            assert (report.version, list(report.acked), report.missing) == (4, ["replica 0"], ())
            assert await place.registry.acknowledged("p1", keys[1].token) is None

    asyncio.run(story())


def test_a_wrong_adapter_is_its_own_runs_affair(world: Any) -> None:
    async def story() -> None:
        async with world(replicas=1) as place:
            a, b = await place.join("a"), await place.join("b")
            (replica,) = place.replicas
            replica.life.load_patience_s = 0.0  # the first failure that may be the replica's own kills it
            replica.engine.failures = [UserInputError("does not fit")]
            assert await place.publish(a, 1, "a") and await place.publish(b, 1, "b")
            with pytest.raises(NotLoadedError, match="version 1 of policy a|Version 1 of policy a"):
                await replica.shelf.open("a", a.token, 1)
            await replica.shelf.open("b", b.token, 1)
            await replica.shelf.open("a", a.token, 1)  # tried again
            assert not replica.life.death
            replica.engine.failures = [OSError("disk full")]
            assert await place.publish(a, 2, "a2")
            with pytest.raises(NotLoadedError, match="disk full"):
                await replica.shelf.open("a", a.token, 2)
            assert "disk full" in replica.life.death

    asyncio.run(story())


def test_a_crashed_user_is_collected_and_the_last_one_ends_the_service(world: Any) -> None:
    async def story() -> None:
        async with world() as place:
            a, b = await place.join("a"), await place.join("b")
            assert await place.publish(a, 1, "a")
            await place.replicas[0].shelf.open("a", a.token, 1)
            for _ in range(2):  # b goes on, a has crashed
                place.skipped_s += 0.7 * place.run.serving.sharing.lease_s
                assert await place.registry.renew("b", b.token)
            await until(lambda: "a" not in place.replicas[0].shelf.policies)
            await until(lambda: not place.replicas[0].engine.newest)
            assert not await place.registry.renew("a", a.token) and not place.gone
            assert [path.name for path in place.folder.iterdir() if path.is_dir()] == ["1"]
            again = await place.join("c")
            assert again.seat == 0  # the place of the one that is gone
            for key in (b, again):
                await place.registry.leave(key.policy, key.token)
            await until(lambda: len(place.gone) == 2)
            assert place.gone == ["test", "itself"] and not place.folder.exists()
            assert await place.registry.join("d", "token", place.terms) == ""  # come again soon

    asyncio.run(story())


def test_replicas_follow_the_number_of_policies(world: Any) -> None:
    sharing = {
        "serving__num_replicas": 1,
        "serving__sharing__policies_per_replica": 2,
        "serving__sharing__replica_limit": 3,
    }

    async def story() -> None:
        async with world(**sharing) as place:
            keeper = await place.join("keeper", keeper=True)
            keys = []
            await until(lambda: place.deployed == [1])
            for count, wanted in ((2, [1]), (3, [1, 2]), (8, [1, 2, 3])):
                while len(keys) < count:
                    keys.append(await place.join(f"p{len(keys)}"))
                await asyncio.sleep(0.05)
                await until(lambda wanted=wanted: place.deployed[-1] == wanted[-1])
            for key in keys:
                await place.registry.leave(key.policy, key.token)
            await until(lambda: place.deployed[-1] == 1)
            assert not place.gone  # the keeper is there
            await place.registry.leave(keeper.policy, keeper.token)
            await until(lambda: place.gone)

    asyncio.run(story())


def test_a_service_that_cannot_start_says_why(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no Serve here")

    async def story() -> None:
        async with world(replicas=0) as place:
            monkeypatch.setattr(deploying, "deploy_shared", fail)
            with suppress(AssertionError):
                await place.join("a")
            await until(lambda: place.registry._failure)
            assert "no Serve here" in (await place.registry.status())["failure"]
            assert "no Serve here" in await place.registry.join("b", "token", place.terms)
            await until(lambda: place.gone)

    asyncio.run(story())


def test_a_restarted_registry_does_not_end_the_service_where_scaling_fails_once(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with world() as here:
            await here.join("a")
            await until(lambda: here.deployed)
            here.restart_registry()
            failures = [RuntimeError("Serve's controller is busy")]

            def deploy(model: Any, run: Any, name: str, count: int, if_found: str) -> None:
                if failures:
                    raise failures.pop()
                here.deployed.append(count)

            monkeypatch.setattr(deploying, "deploy_shared", deploy)
            deployed = len(here.deployed)
            here.registry._ensure_working()
            await until(lambda: len(here.deployed) > deployed)
            assert not failures and not here.gone and not here.registry._closing

    asyncio.run(story())


def test_a_kill_while_somebody_joins_does_not_keep_others_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> Members:
        return Members(tmp_path / "registry", 10.0, 0.0, lambda folder, policy: VersionLine(folder, policy))

    first = made()
    assert first.join("a", "token a", False, 0.0) is not None
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Members, "_save", lambda self: (_ for _ in ()).throw(KeyboardInterrupt()))
        first.join("b", "token b", False, 0.0)
    again = made()
    assert [member.policy for member in again] == ["a"]
    assert all(again.join(name, f"token {name}", False, 0.0) is not None for name in ("b", "c"))
    assert len({member.line.folder for member in again}) == 3


def test_bytes_that_never_come_keep_no_other_policy_waiting(world: Any) -> None:
    async def story() -> None:
        async with world(replicas=1) as place:
            a, b = await place.join("a"), await place.join("b")
            lost: Any = asyncio.get_running_loop().create_future()  # of a run whose node is cut off
            assert await place.registry.publish(Published(1, "hash", lost, "a", kept_on_disk=False), a.token)
            assert await place.publish(b, 1, "b")
            (replica,) = place.replicas
            waiting = asyncio.create_task(replica.shelf.open("a", a.token, 1))
            await until(lambda: "a" in replica.shelf.policies and replica.shelf.policies["a"].loading is not None)
            await asyncio.wait_for(replica.shelf.open("b", b.token, 1), 5)
            assert not waiting.done() and not replica.life.death
            waiting.cancel()

    asyncio.run(story())


def test_a_registry_that_comes_back_without_its_folder_drops_nobody_who_joins_again(world: Any) -> None:
    """Its node is gone: replicas keep what they have, and requests wait, until every user had the time to join again."""

    async def story() -> None:
        async with world(replicas=1) as place:
            a, b = await place.join("a"), await place.join("b")
            (replica,) = place.replicas
            for key in (a, b):
                assert await place.publish(key, 1, key.policy)
                await replica.shelf.open(key.policy, key.token, 1)
            await until(lambda: place.how == ["replace"])  # what another service left over has another model
            waiting = asyncio.create_task(replica.shelf.open("a", a.token, 2))
            shutil.rmtree(place.folder)
            place.restarted = True
            place.restart_registry()
            place.registry._ensure_working()
            await until(lambda: replica.shelf._since is not None and replica.shelf._since[0] == place.registry._process)
            await until(lambda: place.how[1:] == ["keep"])
            assert replica.engine.newest.keys() == {"a", "b"} and not waiting.done()
            assert isinstance(await place.registry.join("a", a.token, place.terms), Welcome)
            assert await place.publish(a, 2, "a 2")
            await asyncio.wait_for(waiting, 5)
            for _ in range(2):  # b does not come again
                place.skipped_s += 0.6 * place.run.serving.sharing.lease_s
                assert await place.registry.renew("a", a.token)
            await until(lambda: replica.engine.newest.keys() == {"a"})
            await until(lambda: place.how[2:] == ["resize"])
            c = await place.join("c")
            await until(lambda: "c" in replica.shelf.policies)
            await place.registry.leave("c", c.token)
            await until(lambda: "c" not in replica.shelf.policies)

    asyncio.run(story())


def test_a_registry_that_was_stopped_blames_nobody_for_its_own_silence(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with world(replicas=0) as place:
            monkeypatch.setattr(shared_registry, "_STALL_S", 0.2)
            place.registry._members._lease_s = 1.0
            a = await place.join("a")
            await asyncio.sleep(0.05)
            time.sleep(1.5)  # as SIGSTOP does; a's calls wait meanwhile
            await asyncio.sleep(0.05)
            assert await place.registry.renew("a", a.token)
            place.skipped_s += 2.0
            await until(lambda: not len(place.registry._members))  # of its own silence it is collected

    asyncio.run(story())


def test_a_service_ends_although_serve_is_busy(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with world(replicas=0) as place:
            failures = [RuntimeError("Serve's controller is being restarted")]

            def delete(name: str) -> None:
                if failures:
                    raise failures.pop()
                place.gone.append(name)

            monkeypatch.setattr(deploying, "delete_shared", delete)
            a = await place.join("a")
            await place.registry.leave("a", a.token)
            await until(lambda: place.gone == ["test", "itself"])

    asyncio.run(story())


def test_replicas_whose_registry_is_gone_for_good_end_their_application(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone() -> Any:
        raise ValueError("Failed to look up the actor")

    async def story() -> None:
        async with world(replicas=1) as place:
            monkeypatch.setattr(follower, "_ABANDONED_S", 0.1)
            place.replicas[0].shelf._find_registry._find = gone
            await until(lambda: place.gone == ["replica 0"])

    asyncio.run(story())


def test_a_full_disk_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    found = Members(tmp_path / "registry", 10.0, 0.0, lambda folder, policy: VersionLine(folder, policy))
    monkeypatch.setattr(members, "write_atomic", full)
    monkeypatch.setattr(Path, "mkdir", full)
    for name in ("a", "b"):
        assert found.join(name, f"token {name}", False, 0.0) is not None
    member = found.opened("a", "token a")
    assert member is not None
    found.remove(member, 0.0)
    assert [one.policy for one in found] == ["b"]
