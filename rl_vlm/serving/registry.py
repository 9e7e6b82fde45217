"""AdapterRegistry: the actor that owns the newest adapter and sends it to every replica.

Replicas keep one call open each (`wait_newer`); a publication answers all of them at once. A replica
that starts late, restarts or misses a call asks again and gets the newest version. An
acknowledgement carries the hash of what the replica loaded. The newest adapter is also on disk, so that the registry
itself can be restarted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rl_vlm.models.reference import travelling_files
from rl_vlm.serving.shared_types import SHARED_NAMESPACE
from rl_vlm.serving.version_line import FETCH_S, Published, PublishReport, VersionLine, disk_thread

# A replica that has not asked for this long is not waited for: it died, or its node left.
LIVE_WINDOW_S = 15.0
# Every replica keeps a call open; beyond this number of calls a publication would wait for one of them to end.
_MOST_CALLS = 10_000
_LOOK_S = 1.0  # how often to look whether a replica that is waited for is still there
# How long one open `wait_newer` call lasts before the replica asks again.
POLL_S = 5.0


class AdapterRegistry:
    """The actor's class; `start_registry` makes the actor. All methods are coroutines on one event loop."""

    def __init__(self, folder: str, model: str) -> None:
        self._line, self._model = VersionLine(Path(folder)), Path(model)
        self._reports: dict[str, dict[str, Any]] = {}  # replica -> its last report
        self._seen: dict[str, float] = {}  # replica -> when it last asked
        self._rest = False  # whether replicas are to rest (`serving.vllm.rest_while_learning`)
        self._resting: set[str] = set()  # those that do
        self._changed = asyncio.Condition()
        self._disk = disk_thread()

    async def model_files(self) -> Mapping[str, bytes]:
        """What other nodes need of the model (`travelling_files`), by file name."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, travelling_files, self._model)

    async def publish(self, published: Published) -> None:
        """Make a version the newest and hand it to all replicas. A repeated call with an equal hash changes nothing.

        Replicas verify the bytes against the hash, and load while the disk writes. Raises PublishError.
        """
        if not self._line.add(published):
            return
        self._rest = False  # to sample with it
        async with self._changed:
            self._changed.notify_all()
        await self._line.persist(published, self._disk)

    async def wait_newer(
        self, replica_id: str, version: int, report: dict[str, Any] | None = None, resting: bool = False
    ) -> Published | bool | None:
        """The newest adapter once it is newer than `version`, or whether to rest once that differs from `resting`; None after a while
        without either.

        `report` is the replica's own report (see `ReplicaTally`).
        """
        self._seen[replica_id] = time.monotonic()
        if report is not None:
            self._reports[replica_id] = report
        if resting != (replica_id in self._resting):
            self._resting ^= {replica_id}
            async with self._changed:
                self._changed.notify_all()

        def news() -> bool:
            return self._newer(version) or resting != self._rest

        if not news():
            try:
                async with asyncio.timeout(POLL_S), self._changed:
                    await self._changed.wait_for(news)
            except TimeoutError:
                return None
        self._seen[replica_id] = time.monotonic()
        return self._line.newest if self._newer(version) else self._rest

    async def let_rest(self, rest: bool, timeout_s: float) -> list[str]:
        """Tell all replicas to rest until the next version, or to wake; returns once they do, or after `timeout_s` those that do not."""
        self._rest = rest

        def late() -> set[str]:
            return self._live() - self._resting if rest else self._live() & self._resting

        async with self._changed:
            self._changed.notify_all()
        deadline = time.monotonic() + timeout_s
        while late() and self._rest == rest and time.monotonic() < deadline:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S), self._changed:
                    await self._changed.wait()
        return sorted(late())

    def _newer(self, version: int) -> bool:
        return self._line.newest is not None and self._line.newest.version > version

    async def newest(self) -> Published | None:
        """The newest adapter; None before the first publication."""
        return self._line.newest

    async def ack(self, replica_id: str, version: int, sha256: str) -> float:
        """A replica reports the version that it serves and the hash of the bytes that it loaded.

        Returns the seconds from publication until now, also when a newer version is out; 0 for a version that is not known.
        """
        self._seen[replica_id] = time.monotonic()
        seconds = self._line.ack(replica_id, version, sha256)
        async with self._changed:
            self._changed.notify_all()
        return seconds

    async def report(self, version: int, expected: int, timeout_s: float) -> PublishReport:
        """Who has acknowledged `version`, once `expected` replicas have (or a newer one is out), at most `timeout_s` later."""

        def complete() -> bool:
            newest = self._line.newest
            return (newest is not None and newest.version != version) or len(self._line.acks(version)) >= expected

        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(complete)
        except TimeoutError:
            pass
        return self._line.report(version, self._live())

    async def acknowledged(self) -> PublishReport | None:
        """Who has acknowledged the newest version that any replica has; None before the first acknowledgement."""
        return self._line.acknowledged(self._live())

    def _live(self) -> set[str]:
        now = time.monotonic()
        return {replica for replica, seen in self._seen.items() if now - seen < LIVE_WINDOW_S}

    async def status(self) -> dict[str, Any]:
        """The newest version, its hash, and the reports of the replicas that asked lately."""
        live = self._live()
        for gone in self._reports.keys() - live:
            del self._reports[gone]
        return {
            "version": self._line.newest.version if self._line.newest else 0,
            "sha256": self._line.newest.sha256 if self._line.newest else "",
            "replicas": sorted(live),
            "reports": dict(self._reports),
        }


def registry_name(run_id: str) -> str:
    """The actor's name."""
    return f"rl-vlm-registry-{run_id}"


def fetch_model_files(run_id: str, namespace: str | None = None) -> Mapping[str, bytes]:
    """The registry's `model_files`. `namespace`: null is that of the caller's job, and that of shared services. Blocks, so it is not
    for coroutines."""
    try:
        registry = ray.get_actor(registry_name(run_id), namespace=namespace)
    except ValueError:
        if namespace is not None:
            raise
        registry = ray.get_actor(registry_name(run_id), namespace=SHARED_NAMESPACE)
    return ray.get(registry.model_files.remote(), timeout=FETCH_S)  # type: ignore[no-any-return]


def start_registry(run_id: str, namespace: str, folder: Path, model: Path) -> ray.actor.ActorHandle:
    """Start the registry of a run on the caller's node; it restarts by itself as often as it dies, and ends with the caller.

    `folder` holds its copy of the newest adapter, `model` is the model's folder: both are on the caller's node.
    """
    folder.mkdir(parents=True, exist_ok=True)
    actor = ray.remote(AdapterRegistry).options(
        name=registry_name(run_id),
        namespace=namespace,
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=_MOST_CALLS,
        # Where the folder is: elsewhere a restarted registry would find nothing to read.
        scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
    )
    return actor.remote(str(folder), str(model))  # type: ignore[no-any-return]
