"""The registry's memory of acknowledgements, without Ray: replicas that are slower than the learner."""

from __future__ import annotations

import asyncio

import pytest
from loops import in_loop
from registry_support import arrived, own_registry, publish

from rl_vlm.models.weights import AdapterPayload
from rl_vlm.serving import registry
from rl_vlm.serving import registry as module
from rl_vlm.serving.registry import Changes, Published, PublishError, PublishReport, Registry
from rl_vlm.types import POLICY


def test_a_replica_slower_than_an_iteration_is_reported_with_its_real_time() -> None:
    async def story() -> tuple[list[float], list[PublishReport | None]]:
        registry, seconds, reports = await own_registry(), [], []
        for version in (1, 2, 3):
            reports.append(await registry.acknowledged())
            await publish(registry, version)
            await registry.watch("slow", None)
            if version > 1:
                await asyncio.sleep(0.05)
                seconds.append(await registry.ack("slow", POLICY, version - 1, f"hash {version - 1}"))
        reports.append(await registry.acknowledged())
        return seconds, reports

    seconds, reports = asyncio.run(story())
    assert min(seconds) >= 0.05
    assert reports[:2] == [None, None]
    for version, found in zip((1, 2), reports[2:], strict=True):
        assert found is not None and found.version == version
        assert found.acked == {"slow": found.seconds} and found.seconds >= 0.05
        assert found.missing == ()


def test_replicas_that_have_not_acknowledged_it_are_missing() -> None:
    async def story() -> tuple[float, PublishReport | None, PublishReport]:
        registry = await own_registry()
        await publish(registry, 1)
        for replica in ("fast", "slow"):
            await registry.watch(replica, None)
            await registry.ack(replica, POLICY, 1, "hash 1")
        await publish(registry, 2)
        wrong = await registry.ack("slow", POLICY, 2, "another hash")
        await registry.ack("fast", POLICY, 2, "hash 2")
        return wrong, await registry.acknowledged(), await registry.report(2, 2, 0.05)

    wrong, found, report = asyncio.run(story())
    assert wrong == 0.0
    assert found is not None and (found.version, list(found.acked), found.missing) == (2, ["fast"], ("slow",))
    assert report == found


def test_memory_of_versions_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_REMEMBERED", 3)

    async def story() -> list[float]:
        registry = await own_registry()
        for version in range(1, 6):
            await publish(registry, version)
        return [await registry.ack("late", POLICY, version, f"hash {version}") for version in range(1, 6)]

    assert [seconds > 0 for seconds in asyncio.run(story())] == [False, False, True, True, True]


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
    after = Registry()
    found = await after.watch("replica", seen.revision)
    assert found is not None and not found.newest and not found.left and found.present is None
    published = Published(1, "hash 1", arrived(AdapterPayload(1, b"", "{}", "hash 1")))
    assert not await after.publish(published) and not await after.renew(POLICY)
    await after.join(POLICY, published)
    assert await after.renew(POLICY)
    found = await after.watch("replica", found.revision)
    assert found is not None and found.newest == {POLICY: published}
