"""The versions of one policy: the newest adapter, who has acknowledged which, and the newest on disk."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import ray
from ray.exceptions import RayError

from rl_vlm.models.payload import WeightPayload
from rl_vlm.models.trained import read_payload
from rl_vlm.types import POLICY, RLVLMError, UserInputError

logger = logging.getLogger(__name__)

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
    policy: str = POLICY
    kept_on_disk: bool = True  # by the registry, for when it is restarted

    @classmethod
    def of(cls, payload: WeightPayload, on_disk: bool = False) -> Published:
        """The payload, put into the object store; `on_disk`: the registry keeps it, even if its kind is not kept otherwise."""
        kept = on_disk or payload.KEPT_ON_DISK
        return cls(payload.version, payload.sha256, ray.put(payload), payload.policy, kept)


@dataclass(slots=True)
class _Acknowledgements:
    """Of one version: replica id -> seconds from publication to its acknowledgement."""

    sha256: str
    published_at: float
    seconds: dict[str, float] = field(default_factory=dict)


class VersionLine:
    """The versions of one policy, whose numbers only grow. What a folder holds of an earlier process is taken over."""

    def __init__(self, folder: Path, policy: str = POLICY, put: Callable[[WeightPayload], ray.ObjectRef] = ray.put):
        self.folder, self._policy = folder, policy
        self.newest: Published | None = None
        self._remembered: OrderedDict[int, _Acknowledgements] = OrderedDict()  # by version, oldest first
        self._restore(put)

    def _restore(self, put: Callable[[WeightPayload], ray.ObjectRef]) -> None:
        marker = self.folder / "newest.json"
        if not marker.is_file():
            return
        try:
            newest = json.loads(marker.read_text())
            payload = read_payload(self.folder / newest["folder"], newest["version"], self._policy)
        except (OSError, ValueError, KeyError, TypeError, UserInputError) as error:
            # A machine that lost its power, say. The run offers what it has published last again.
            logger.warning("the copy of %s in %s cannot be read: %s", self._policy, self.folder, error)
            return
        if payload.sha256 == newest["sha256"]:
            self._remember(Published(payload.version, payload.sha256, put(payload), self._policy))

    def _remember(self, published: Published) -> None:
        self.newest = published
        self._remembered[published.version] = _Acknowledgements(published.sha256, time.monotonic())
        while len(self._remembered) > _REMEMBERED:
            self._remembered.popitem(last=False)

    def add(self, published: Published) -> bool:
        """Make a version the newest; False for a repeated call with an equal hash. Raises PublishError."""
        if self.newest is not None and published.version <= self.newest.version:
            if (published.version, published.sha256) == (self.newest.version, self.newest.sha256):
                return False
            raise PublishError(
                f"Version {published.version} cannot follow version {self.newest.version}: versions only grow."
            )
        self._remember(published)
        return True

    async def persist(self, published: Published, disk: Executor) -> None:
        """Write a version to disk, unless it is not to be kept there. With a full disk only a restarted registry has nothing to read."""
        if not published.kept_on_disk:
            return
        try:
            async with asyncio.timeout(FETCH_S):
                payload: WeightPayload = await published.ref
            await asyncio.get_running_loop().run_in_executor(disk, self._write, payload)
        except (OSError, RayError) as error:
            logger.warning("version %d of %s is not on disk: %s", published.version, self._policy, error)
            with suppress(OSError):  # of a file system that is gone for a while; what it holds is then offered again
                (self.folder / "newest.json").unlink(missing_ok=True)

    def _write(self, payload: WeightPayload) -> None:
        # Two folders in turn: the marker always names a complete one.
        folder = f"adapter-{payload.version % 2}"
        payload.write(self.folder / folder)
        marker = self.folder / "newest.json"
        temporary = marker.with_suffix(".tmp")
        temporary.write_text(json.dumps({"folder": folder, "version": payload.version, "sha256": payload.sha256}))
        temporary.replace(marker)

    def ack(self, replica_id: str, version: int, sha256: str) -> float:
        """Note who serves a version; returns the seconds since its publication, 0 for a version that is not known."""
        known = self._remembered.get(version)
        if known is None or known.sha256 != sha256:
            return 0.0
        seconds = known.seconds[replica_id] = time.monotonic() - known.published_at
        return seconds

    def acks(self, version: int) -> dict[str, float]:
        """Replica id -> seconds from publication to its acknowledgement."""
        known = self._remembered.get(version)
        return known.seconds if known is not None else {}

    def report(self, version: int, live: Collection[str]) -> PublishReport:
        """Who of the live replicas has acknowledged a version."""
        acked = dict(self.acks(version))
        return PublishReport(version, acked, tuple(sorted(set(live) - acked.keys())))

    def acknowledged(self, live: Collection[str]) -> PublishReport | None:
        """The report of the newest version that any replica has; None before the first acknowledgement."""
        version = next((version for version in reversed(self._remembered) if self.acks(version)), None)
        return None if version is None else self.report(version, live)


def disk_thread() -> ThreadPoolExecutor:
    """One thread for writing, of a lower priority, so that replicas load a version before it is written where cores are few."""
    return ThreadPoolExecutor(1, initializer=_lower_priority)


def _lower_priority() -> None:
    if sys.platform == "linux":  # where each thread has its own priority
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
