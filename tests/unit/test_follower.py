"""A replica goes on following the registry whatever a load raises. The registry and the engine are real, Ray is left out."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from core_support import adapted_policy
from engine_support import until
from http_support import tiny_engine
from loops import in_loop
from registry_support import Direct, arrived, own_registry, publish

from rl_vlm.engines.base import EngineError
from rl_vlm.engines.transformers_engine import TransformersEngine
from rl_vlm.models.weights import AdapterPayload
from rl_vlm.serving import registry as module
from rl_vlm.serving.counters import ReplicaTally
from rl_vlm.serving.follower import Follower
from rl_vlm.serving.health import Lifecycle, ReplicaState
from rl_vlm.serving.registry import Changes, Published, PublishError, VersionRegistry
from rl_vlm.types import POLICY, UserInputError


class Setting:
    """A follower, its engine and its registry on one event loop."""

    def __init__(self, engine: TransformersEngine, *failures: Exception) -> None:
        self.engine, self.failures = engine, list(failures)
        self.registry = VersionRegistry()
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


@in_loop
async def test_an_adapter_that_could_not_be_loaded_and_left_does_not_count_against_the_replica(
    engine: TransformersEngine, payloads: list[AdapterPayload]
) -> None:
    setting = Setting(engine, *[EngineError("vLLM rejected it")] * 1000)
    await setting.publish(payloads[0])
    task = asyncio.create_task(setting.follower.run())
    await until(lambda: len(setting.failures) < 999)
    assert "vLLM rejected it" in setting.life.load_error
    await setting.registry.leave(POLICY)
    await until(lambda: setting.life.load_error == "" and POLICY not in setting.follower.policies)
    task.cancel()


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

    setting.follower.find_registry = gone
    task = asyncio.create_task(setting.follower.run())
    await until(lambda: setting.abandoned >= 1)
    assert not task.done()  # Serve ends the replica
    task.cancel()


# --- The registry's memory of acknowledgements: replicas that are slower than the learner


@in_loop
async def test_an_acknowledgement_counts_for_the_bytes_that_were_published() -> None:
    registry = await own_registry()
    await publish(registry, 1)
    for replica in ("fast", "slow"):
        await registry.watch(replica, None)
        await registry.ack(replica, POLICY, 1, "hash 1")
    await publish(registry, 2)
    assert await registry.ack("slow", POLICY, 2, "another hash") == 0.0
    await registry.ack("fast", POLICY, 2, "hash 2")
    found = await registry.acknowledged()
    assert found is not None and (found.version, list(found.acked)) == (2, ["fast"])
    assert await registry.report(2, 2, 0.05) == found


@in_loop
async def test_a_version_never_changes_and_numbers_only_grow() -> None:
    registry = await own_registry()
    await publish(registry, 2)
    await publish(registry, 2)  # again, with the same bytes
    for version, sha256 in ((2, "other bytes"), (1, "hash 1")):
        with pytest.raises(PublishError):
            await registry.publish(Published(version, sha256, arrived(AdapterPayload(version, b"", "{}", sha256))))


@in_loop
async def test_a_restarted_registry_knows_nobody_until_its_tenant_joins_with_the_newest_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.05)
    before = await own_registry()
    await publish(before, 1)
    seen = await before.watch("replica", None)
    assert isinstance(seen, Changes) and await before.watch("replica", seen.revision) is None
    after = VersionRegistry()
    found = await after.watch("replica", seen.revision)
    assert found is not None and not found.newest and not found.left and found.present is None
    published = Published(1, "hash 1", arrived(AdapterPayload(1, b"", "{}", "hash 1")))
    assert not await after.publish(published) and not await after.renew(POLICY)
    await after.join(POLICY, published)
    assert await after.renew(POLICY)
    found = await after.watch("replica", found.revision)
    assert found is not None and found.newest == {POLICY: published}


# --- A replica's life: states, what requests meet, and when an engine has to prove itself


def serving() -> Lifecycle:
    life = Lifecycle(probe_after_s=10.0)
    life.started = True
    life.load()
    life.pass_probe(now=0.0)
    return life


def test_a_new_engine_has_to_prove_itself() -> None:
    life = Lifecycle(probe_after_s=10.0)
    life.observe(0, now=5.0)
    assert life.probe_due(5.0) and not life.proven
    life.observe(1, now=6.0)
    assert life.proven and not life.probe_due(6.0)


def test_an_engine_proves_itself_only_when_it_has_been_silent() -> None:
    life = serving()
    assert not life.probe_due(9.9)
    assert life.probe_due(10.0)
    life.observe(7, now=9.0)
    assert not life.probe_due(18.9)
    life.observe(7, now=18.9)  # the same count is no progress
    assert life.probe_due(19.0)
    life.pass_probe(now=19.0)
    assert not life.probe_due(28.9)


def test_a_silent_engine_is_suspect_then_dead() -> None:
    life = serving()
    life.fail_probe("no token within 5 s")
    assert life.state is ReplicaState.SUSPECT
    assert life.rejects
    assert life.probe_due(0.0)  # at once, whatever it produced before
    life.fail_probe("no token within 5 s")
    assert life.state is ReplicaState.DEAD
    assert life.death == "no token within 5 s (2 times in a row)"
    assert not life.probe_due(1e9)


@pytest.mark.parametrize("recovery", ["probe", "progress"])
def test_a_suspect_that_produces_again_is_trusted_again(recovery: str) -> None:
    life = serving()
    life.fail_probe("slow")
    if recovery == "probe":
        life.pass_probe(now=5.0)
    else:
        life.observe(1, now=5.0)
    assert life.state is ReplicaState.SERVING
    life.fail_probe("slow")
    assert life.state is ReplicaState.SUSPECT  # failures in a row count, not in a lifetime


def test_a_first_load_that_fails_does_not_leave_it_starting_for_ever() -> None:
    life = Lifecycle(probe_after_s=10.0, load_patience_s=30.0)
    assert (life.state, life.ready, life.rejects) == (ReplicaState.STARTING, False, False)
    life.fail_load("out of memory", now=5.0)
    assert (life.state, life.rejects) == (ReplicaState.STARTING, True)
    life.fail_load("out of memory", now=34.9)
    assert life.state is ReplicaState.STARTING
    life.fail_load("out of memory", now=35.0)
    assert (life.state, life.death) == (ReplicaState.DEAD, "out of memory")


def test_patience_begins_anew_after_a_success_and_has_no_end_for_an_adapter_that_is_wrong() -> None:
    life = Lifecycle(probe_after_s=10.0, load_patience_s=30.0)
    life.started = True
    life.fail_load("no space left", now=0.0)
    life.load()
    life.fail_load("no space left", now=100.0)
    assert life.state is not ReplicaState.DEAD
    life.fail_load("does not fit the model", now=1000.0, curable=False)
    assert life.state is not ReplicaState.DEAD
    life.load()
    for now in (1100.0, 1200.0):  # an adapter that is wrong does not begin the time in which others may fail
        life.fail_load("does not fit the model", now=now, curable=False)
    life.fail_load("no space left", now=1201.0)
    assert life.state is not ReplicaState.DEAD


def test_death_is_final_and_keeps_its_first_reason() -> None:
    life = serving()
    life.die("the engine core has died")
    life.die("something else")
    for event in (life.load, lambda: life.pass_probe(1.0), lambda: life.observe(99, 1.0)):
        event()
        assert life.state is ReplicaState.DEAD
    assert life.death == "the engine core has died"
    assert life.rejects


@in_loop
async def test_a_replica_slower_than_an_iteration_is_reported_with_its_real_time() -> None:
    registry, seconds, reports = await own_registry(), [], []
    for version in (1, 2, 3):
        reports.append(await registry.acknowledged())
        await publish(registry, version)
        await registry.watch("slow", None)
        if version > 1:
            await asyncio.sleep(0.05)
            seconds.append(await registry.ack("slow", POLICY, version - 1, f"hash {version - 1}"))
    reports.append(await registry.acknowledged())
    assert min(seconds) >= 0.05
    assert reports[:2] == [None, None]
    for version, found in zip((1, 2), reports[2:], strict=True):
        assert found is not None and found.version == version
        assert found.acked == {"slow": found.seconds} and found.seconds >= 0.05


@in_loop
async def test_memory_of_versions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REMEMBERED", 3)
    registry = await own_registry()
    for version in range(1, 6):
        await publish(registry, version)
    seconds = [await registry.ack("late", POLICY, version, f"hash {version}") for version in range(1, 6)]
    assert [known > 0 for known in seconds] == [False, False, True, True, True]
