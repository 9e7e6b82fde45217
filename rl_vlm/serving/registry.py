"""AdapterRegistry: the actor that owns the newest adapter and tells every replica of it.

Replicas keep one call open each (`wait_newer`); a publication answers all of them at once, which is a push with the
safety of a pull: a replica that starts late, restarts or misses a call asks again and gets the newest version. An
acknowledgement carries the hash of what the replica loaded. The newest adapter is also on disk, so that the registry
itself may die and come back.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from rl_vlm.models.adapter import AdapterPayload
from rl_vlm.types import RLVLMError

# A replica that has not asked for this long is not waited for: it died, or its node left.
LIVE_WINDOW_S = 15.0
# How long one open `wait_newer` call lasts before the replica asks again.
POLL_S = 5.0


class PublishError(RLVLMError):
    """A version cannot be published, because it is not new or its bytes differ from the version's first ones."""


@dataclass(frozen=True, slots=True)
class PublishReport:
    """Who loaded a version: replica id -> seconds from publication to its acknowledgement; `missing`: live, but silent."""

    version: int
    acked: dict[str, float]
    missing: tuple[str, ...]

    @property
    def seconds(self) -> float:
        """From publication to the last acknowledgement."""
        return max(self.acked.values(), default=0.0)


class AdapterRegistry:
    """The actor's class; `start_registry` makes the actor. All methods are coroutines on one event loop."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._payload: AdapterPayload | None = None
        self._published_at = 0.0
        self._acks: dict[int, dict[str, float]] = {}
        self._seen: dict[str, float] = {}  # replica -> when it last asked
        self._changed = asyncio.Condition()
        self._restore()

    def _restore(self) -> None:
        marker = self._folder / "newest.json"
        if marker.is_file():
            newest = json.loads(marker.read_text())
            payload = AdapterPayload.read(self._folder / newest["folder"], newest["version"])
            if payload.sha256 == newest["sha256"]:
                self._payload = payload
                self._published_at = time.monotonic()

    def _persist(self, payload: AdapterPayload) -> None:
        # Two folders in turn: the marker always names a complete one.
        folder = f"adapter-{payload.version % 2}"
        payload.write(self._folder / folder)
        marker = self._folder / "newest.json"
        temporary = marker.with_suffix(".tmp")
        temporary.write_text(json.dumps({"folder": folder, "version": payload.version, "sha256": payload.sha256}))
        temporary.replace(marker)

    async def publish(self, payload: AdapterPayload) -> None:
        """Make a version the newest and hand it to all replicas. A repeated call with equal bytes changes nothing."""
        if self._payload is not None and payload.version <= self._payload.version:
            if payload.version == self._payload.version and payload.sha256 == self._payload.sha256:
                return
            raise PublishError(
                f"Version {payload.version} cannot follow version {self._payload.version}: versions only grow."
            )
        payload.verify()
        self._payload = payload
        self._published_at = time.monotonic()
        self._acks = {payload.version: {}}
        async with self._changed:
            self._changed.notify_all()
        # Replicas load while the disk writes. A full disk costs only the copy that a restarted registry would read.
        try:
            await asyncio.to_thread(self._persist, payload)
        except OSError:
            (self._folder / "newest.json").unlink(missing_ok=True)

    async def wait_newer(self, replica_id: str, version: int) -> AdapterPayload | None:
        """The newest adapter once it is newer than `version`; None after a while without one."""
        self._seen[replica_id] = time.monotonic()
        if not self._newer(version):
            try:
                async with asyncio.timeout(POLL_S), self._changed:
                    await self._changed.wait_for(lambda: self._newer(version))
            except TimeoutError:
                return None
        self._seen[replica_id] = time.monotonic()
        return self._payload

    def _newer(self, version: int) -> bool:
        return self._payload is not None and self._payload.version > version

    async def newest(self) -> AdapterPayload | None:
        """The newest adapter; None before the first publication."""
        return self._payload

    async def ack(self, replica_id: str, version: int, sha256: str) -> None:
        """A replica reports the version that it serves and the hash of the bytes that it loaded."""
        self._seen[replica_id] = time.monotonic()
        if self._payload is None or version != self._payload.version or sha256 != self._payload.sha256:
            return  # a late report of an older version
        self._acks.setdefault(version, {})[replica_id] = time.monotonic() - self._published_at
        async with self._changed:
            self._changed.notify_all()

    async def report(self, version: int, expected: int, timeout_s: float) -> PublishReport:
        """Wait until `expected` replicas have acknowledged `version` (or a newer one is out), at most `timeout_s`."""

        def complete() -> bool:
            replaced = self._payload is not None and self._payload.version != version
            return replaced or len(self._acks.get(version, {})) >= expected

        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(complete)
        except TimeoutError:
            pass
        acked = dict(self._acks.get(version, {}))
        now = time.monotonic()
        live = (replica for replica, seen in self._seen.items() if now - seen < LIVE_WINDOW_S)
        return PublishReport(version, acked, tuple(sorted(replica for replica in live if replica not in acked)))

    async def status(self) -> dict[str, Any]:
        """The newest version, its hash, and the replicas that asked lately."""
        now = time.monotonic()
        return {
            "version": self._payload.version if self._payload else 0,
            "sha256": self._payload.sha256 if self._payload else "",
            "replicas": sorted(replica for replica, seen in self._seen.items() if now - seen < LIVE_WINDOW_S),
        }


def registry_name(run_id: str) -> str:
    """The actor's name."""
    return f"rl-vlm-registry-{run_id}"


def start_registry(run_id: str, namespace: str, folder: Path) -> ray.actor.ActorHandle:
    """Start the registry of a run; it restarts by itself as often as it dies, and ends with the caller."""
    folder.mkdir(parents=True, exist_ok=True)
    actor = ray.remote(AdapterRegistry).options(
        name=registry_name(run_id),
        namespace=namespace,
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=1000,
        scheduling_strategy="DEFAULT",
    )
    return actor.remote(str(folder))  # type: ignore[no-any-return]
