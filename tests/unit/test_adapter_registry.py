"""The registry's memory of acknowledgements, without Ray: replicas that are slower than the learner."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from registry_support import publish

from rl_vlm.serving import version_line as module
from rl_vlm.serving.registry import AdapterRegistry
from rl_vlm.serving.version_line import PublishReport


def test_a_replica_slower_than_an_iteration_is_reported_with_its_real_time(tmp_path: Path) -> None:
    async def story() -> tuple[list[float], list[PublishReport | None]]:
        registry, seconds, reports = AdapterRegistry(str(tmp_path), str(tmp_path)), [], []
        for version in (1, 2, 3):
            reports.append(await registry.acknowledged())
            await publish(registry, version)
            await registry.wait_newer("slow", version - 1)
            if version > 1:
                await asyncio.sleep(0.05)
                seconds.append(await registry.ack("slow", version - 1, f"hash {version - 1}"))
        reports.append(await registry.acknowledged())
        return seconds, reports

    seconds, reports = asyncio.run(story())
    assert min(seconds) >= 0.05
    assert reports[:2] == [None, None]
    for version, found in zip((1, 2), reports[2:], strict=True):
        assert found is not None and found.version == version
        assert found.acked == {"slow": found.seconds} and found.seconds >= 0.05
        assert found.missing == ()


def test_replicas_that_have_not_acknowledged_it_are_missing(tmp_path: Path) -> None:
    async def story() -> tuple[float, PublishReport | None]:
        registry = AdapterRegistry(str(tmp_path), str(tmp_path))
        await publish(registry, 1)
        for replica in ("fast", "slow"):
            await registry.wait_newer(replica, 0)
            await registry.ack(replica, 1, "hash 1")
        await publish(registry, 2)
        wrong = await registry.ack("slow", 2, "another hash")
        await registry.ack("fast", 2, "hash 2")
        return wrong, await registry.acknowledged()

    wrong, found = asyncio.run(story())
    assert wrong == 0.0
    assert found is not None and (found.version, list(found.acked), found.missing) == (2, ["fast"], ("slow",))


def test_memory_of_versions_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_REMEMBERED", 3)

    async def story() -> list[float]:
        registry = AdapterRegistry(str(tmp_path), str(tmp_path))
        for version in range(1, 6):
            await publish(registry, version)
        return [await registry.ack("late", version, f"hash {version}") for version in range(1, 6)]

    assert [seconds > 0 for seconds in asyncio.run(story())] == [False, False, True, True, True]
