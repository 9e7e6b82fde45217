"""AdapterRegistry: the actor that owns the newest adapter and sends it to every replica.

Replicas keep one call open each (`wait_newer`); a publication answers all of them at once. A replica
that starts late, restarts or misses a call asks again and gets the newest version. An
acknowledgement carries the hash of what the replica loaded. The newest adapter is also on disk, so that the registry
itself can be restarted.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rl_vlm.models.adapter import AdapterPayload
from rl_vlm.models.reference import travelling_files
from rl_vlm.types import RLVLMError

logger = logging.getLogger(__name__)

# A replica that has not asked for this long is not waited for: it died, or its node left.
LIVE_WINDOW_S = 15.0
# How long one open `wait_newer` call lasts before the replica asks again.
POLL_S = 5.0
# Versions whose acknowledgements are kept: a replica may be slower than the learner.
_REMEMBERED = 32
# How long the bytes of a version may take to reach the registry's node.
FETCH_S = 60.0


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


@dataclass(frozen=True, slots=True)
class Published:
    """A published version: its hash, and a reference to the payload, whose bytes each node fetches once."""

    version: int
    sha256: str
    ref: ray.ObjectRef


@dataclass(slots=True)
class _Acknowledgements:
    """Of one version: replica id -> seconds from publication to its acknowledgement."""

    sha256: str
    published_at: float
    seconds: dict[str, float] = field(default_factory=dict)


class AdapterRegistry:
    """The actor's class; `start_registry` makes the actor. All methods are coroutines on one event loop."""

    def __init__(self, folder: str, model: str) -> None:
        self._folder, self._model = Path(folder), Path(model)
        self._newest: Published | None = None
        self._remembered: OrderedDict[int, _Acknowledgements] = OrderedDict()  # by version, oldest first
        self._reports: dict[str, dict[str, Any]] = {}  # replica -> its last report
        self._seen: dict[str, float] = {}  # replica -> when it last asked
        self._changed = asyncio.Condition()
        self._disk = ThreadPoolExecutor(1, initializer=_lower_disk_thread_priority)
        self._restore()

    def _restore(self) -> None:
        marker = self._folder / "newest.json"
        if marker.is_file():
            newest = json.loads(marker.read_text())
            payload = AdapterPayload.read(self._folder / newest["folder"], newest["version"])
            if payload.sha256 == newest["sha256"]:
                self._remember(Published(payload.version, payload.sha256, ray.put(payload)))

    def _remember(self, published: Published) -> None:
        self._newest = published
        self._remembered[published.version] = _Acknowledgements(published.sha256, time.monotonic())
        while len(self._remembered) > _REMEMBERED:
            self._remembered.popitem(last=False)

    def _persist(self, payload: AdapterPayload) -> None:
        # Two folders in turn: the marker always names a complete one.
        folder = f"adapter-{payload.version % 2}"
        payload.write(self._folder / folder)
        marker = self._folder / "newest.json"
        temporary = marker.with_suffix(".tmp")
        temporary.write_text(json.dumps({"folder": folder, "version": payload.version, "sha256": payload.sha256}))
        temporary.replace(marker)

    async def model_files(self) -> Mapping[str, bytes]:
        """What other nodes need of the model (`travelling_files`), by file name."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, travelling_files, self._model)

    async def publish(self, published: Published) -> None:
        """Make a version the newest and hand it to all replicas. A repeated call with an equal hash changes nothing.

        Replicas verify the bytes against the hash. Raises PublishError.
        """
        if self._newest is not None and published.version <= self._newest.version:
            if (published.version, published.sha256) == (self._newest.version, self._newest.sha256):
                return
            raise PublishError(
                f"Version {published.version} cannot follow version {self._newest.version}: versions only grow."
            )
        self._remember(published)
        async with self._changed:
            self._changed.notify_all()
        # Replicas load while the disk writes. With a full disk only a restarted registry has nothing to read.
        try:
            async with asyncio.timeout(FETCH_S):
                payload: AdapterPayload = await published.ref
            await asyncio.get_running_loop().run_in_executor(self._disk, self._persist, payload)
        except (OSError, RayError) as error:
            logger.warning("version %d is not on disk: %s", published.version, error)
            (self._folder / "newest.json").unlink(missing_ok=True)

    async def wait_newer(self, replica_id: str, version: int, report: dict[str, Any] | None = None) -> Published | None:
        """The newest adapter once it is newer than `version`; None after a while without one.

        `report` is the replica's own report (see `ReplicaTally`).
        """
        self._seen[replica_id] = time.monotonic()
        if report is not None:
            self._reports[replica_id] = report
        if not self._newer(version):
            try:
                async with asyncio.timeout(POLL_S), self._changed:
                    await self._changed.wait_for(lambda: self._newer(version))
            except TimeoutError:
                return None
        self._seen[replica_id] = time.monotonic()
        return self._newest

    def _newer(self, version: int) -> bool:
        return self._newest is not None and self._newest.version > version

    async def newest(self) -> Published | None:
        """The newest adapter; None before the first publication."""
        return self._newest

    async def ack(self, replica_id: str, version: int, sha256: str) -> float:
        """A replica reports the version that it serves and the hash of the bytes that it loaded.

        Returns the seconds from publication until now, also when a newer version is out; 0 for a version that is not known.
        """
        self._seen[replica_id] = time.monotonic()
        known = self._remembered.get(version)
        if known is None or known.sha256 != sha256:
            return 0.0
        seconds = known.seconds[replica_id] = time.monotonic() - known.published_at
        async with self._changed:
            self._changed.notify_all()
        return seconds

    async def report(self, version: int, expected: int, timeout_s: float) -> PublishReport:
        """Who has acknowledged `version`, once `expected` replicas have (or a newer one is out), at most `timeout_s` later."""

        def complete() -> bool:
            replaced = self._newest is not None and self._newest.version != version
            return replaced or len(self._acks(version)) >= expected

        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(complete)
        except TimeoutError:
            pass
        return self._report(version)

    async def acknowledged(self) -> PublishReport | None:
        """Who has acknowledged the newest version that any replica has; None before the first acknowledgement."""
        version = next((version for version in reversed(self._remembered) if self._acks(version)), None)
        return None if version is None else self._report(version)

    def _acks(self, version: int) -> dict[str, float]:
        known = self._remembered.get(version)
        return known.seconds if known is not None else {}

    def _report(self, version: int) -> PublishReport:
        acked = dict(self._acks(version))
        return PublishReport(version, acked, tuple(sorted(self._live() - acked.keys())))

    def _live(self) -> set[str]:
        now = time.monotonic()
        return {replica for replica, seen in self._seen.items() if now - seen < LIVE_WINDOW_S}

    async def status(self) -> dict[str, Any]:
        """The newest version, its hash, and the reports of the replicas that asked lately."""
        live = self._live()
        for gone in self._reports.keys() - live:
            del self._reports[gone]
        return {
            "version": self._newest.version if self._newest else 0,
            "sha256": self._newest.sha256 if self._newest else "",
            "replicas": sorted(live),
            "reports": dict(self._reports),
        }


def _lower_disk_thread_priority() -> None:
    """Run the disk thread at a lower priority, so that replicas load a version before it is written where cores are few."""
    if sys.platform == "linux":  # where each thread has its own priority
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def registry_name(run_id: str) -> str:
    """The actor's name."""
    return f"rl-vlm-registry-{run_id}"


def fetch_model_files(run_id: str, namespace: str | None = None) -> Mapping[str, bytes]:
    """The registry's `model_files`. `namespace`: null is that of the caller's job. Blocks, so it is not for coroutines."""
    registry = ray.get_actor(registry_name(run_id), namespace=namespace)
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
        max_concurrency=1000,
        # Where the folder is: elsewhere a restarted registry would find nothing to read.
        scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False),
    )
    return actor.remote(str(folder), str(model))  # type: ignore[no-any-return]
