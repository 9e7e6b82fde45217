"""VersionRegistry: the actor that knows the newest version of each policy of a service and announces it to replicas.

Replicas keep one call open each (`watch`); a publication answers all of them at once. A replica that starts late,
restarts or misses a call asks again and gets the newest versions. An acknowledgement carries the hash of what the
replica loaded. The registry keeps nothing on disk: after a restart its tenants join again and bring their newest
versions.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray
from ray import ObjectRef
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rl_vlm.types import POLICY, RLVLMError

SHARED_NAMESPACE = "rl_vlm"  # of shared services: one for all jobs, so that they find each other's services

# A replica that has not asked for this long is not waited for: it died, or its node left.
LIVE_WINDOW_S = 15.0
# Every replica keeps a call open; beyond this number of calls a publication would wait for one of them to end.
MOST_CALLS = 10_000
_LOOK_S = 1.0  # how often to look whether a replica that is waited for is still there
# How long one open `watch` call lasts before the replica asks again.
POLL_S = 5.0
# Versions whose acknowledgements are kept: a replica may be slower than the learner.
_REMEMBERED = 32

Revision = tuple[str, int]  # of a registry's process, and in it


class PublishError(RLVLMError):
    """A version cannot be published, because it is not new or its bytes differ from the version's first ones.

    Do: let one process alone publish the versions of a name.
    """


@dataclass(frozen=True, slots=True)
class PolicyKey:
    """A policy of a service. `home` is the place of its home replica where several policies share replicas."""

    policy: str = POLICY
    home: int = 0


OWN = PolicyKey()  # of a run with its own replicas


@dataclass(frozen=True, slots=True)
class Published:
    """A published version: its hash, and a reference to the payload, whose bytes each node fetches once."""

    version: int
    sha256: str
    ref: ObjectRef
    policy: str = POLICY
    folder: str = ""  # from which a client has loaded it, as it was named


@dataclass(slots=True)
class PublishReport:
    """The acknowledgements of a version; `acked`: replica id -> seconds from publication to its acknowledgement."""

    version: int
    sha256: str
    published_at: float
    acked: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return max(self.acked.values(), default=0.0)


@dataclass(frozen=True, slots=True)
class Changes:
    """What has changed since an earlier revision."""

    revision: Revision
    newest: Mapping[str, Published | None]  # of the policies that have changed
    left: Collection[str]  # policies that had a tenant and have none now
    present: Collection[str] | None  # policies with a tenant; None while those of before a restart may still come back
    sleep: bool  # whether the replica is to sleep


@dataclass(slots=True)
class Tenant:
    """One user of the service, with its policy."""

    home: int  # the place of the replica that its calls go to first (see `client.homes`)
    deadline: float  # of its lease
    revision: int = 0  # of its last change
    newest: Published | None = None
    reports: dict[int, PublishReport] = field(default_factory=dict)  # by version, in order


class VersionRegistry:
    """The actor's class; `start_registry` makes the actor. All methods are coroutines on one event loop."""

    def __init__(self, lease_s: float = math.inf) -> None:
        self._lease_s = lease_s
        self._tenants: dict[str, Tenant] = {}  # by policy
        self._left: deque[str] = deque(maxlen=1000)  # policies that had a tenant and have none now, the last of them
        self._revision: Revision = (uuid.uuid4().hex, 0)  # which grows with every change
        self._reports: dict[str, dict[str, Any]] = {}  # replica -> its last report
        self._seen: dict[str, float] = {}  # replica -> when it last asked
        self._sleep = False  # whether replicas are to sleep (`serving.vllm.rest_while_learning`)
        self._asleep: set[str] = set()  # replicas that do
        self._changed = asyncio.Condition()
        # Of a shared service: whether every tenant of an earlier process has had the time to join again, and why the
        # service could not be started.
        self._settled, self._failure = False, ""

    async def _notify(self, changed: Tenant | None = None) -> None:
        if changed is not None:
            self._grow()
            changed.revision = self._revision[1]
        async with self._changed:
            self._changed.notify_all()

    def _grow(self) -> None:
        self._revision = (self._revision[0], self._revision[1] + 1)

    async def _wait(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(condition)
        return condition()

    # What tenants call.

    async def join(self, policy: str, newest: Published | None = None) -> int | str:
        """Take a tenant in, with its newest version if it has one; returns the place of its home replica. A repeated
        call changes nothing."""
        if not await self.renew(policy):
            taken = {tenant.home for tenant in self._tenants.values()}
            home = next(place for place in range(len(taken) + 1) if place not in taken)
            self._tenants[policy] = Tenant(home, time.monotonic() + self._lease_s)
            self._left = deque((name for name in self._left if name != policy), maxlen=1000)
            await self._notify(self._tenants[policy])
        if newest is not None:
            await self.publish(newest)
        return self._tenants[policy].home

    async def renew(self, policy: str) -> bool:
        """Prolong a lease; False: it had ended, or the registry was restarted, so join again."""
        if (tenant := self._tenants.get(policy)) is not None:
            tenant.deadline = time.monotonic() + self._lease_s
        return tenant is not None

    async def leave(self, policy: str) -> None:
        """Forget a tenant and, on every replica, its versions."""
        if self._tenants.pop(policy, None) is not None:
            self._left.append(policy)
            self._grow()
            await self._notify()

    async def publish(self, published: Published) -> bool:
        """Make a version the newest of its policy and announce it to replicas; False: the policy has no tenant, so join
        again. A repeated call changes nothing. Raises PublishError."""
        if not await self.renew(published.policy):
            return False
        tenant = self._tenants[published.policy]
        newest, known = tenant.newest, tenant.reports
        if newest is not None and published.version <= newest.version:
            if (published.version, published.sha256) == (newest.version, newest.sha256):
                return True
            raise PublishError(
                f"Version {published.version} cannot follow version {newest.version}: versions only grow."
            )
        tenant.newest = published
        known[published.version] = PublishReport(published.version, published.sha256, time.monotonic())
        if len(known) > _REMEMBERED:
            del known[next(iter(known))]
        self._sleep = False  # to sample with it
        await self._notify(tenant)
        return True

    async def acknowledged(self, policy: str = POLICY) -> PublishReport | None:
        """The report of the newest version that any replica has; None before the first acknowledgement."""
        known = self._tenants[policy].reports.values() if policy in self._tenants else ()
        return next((report for report in reversed(known) if report.acked), None)

    async def report(self, version: int, expected: int, timeout_s: float, policy: str = POLICY) -> PublishReport:
        """The report of a version, once `expected` replicas have it or `timeout_s` is over."""
        known = self._tenants[policy].reports[version]
        await self._wait(lambda: len(known.acked) >= expected, timeout_s)
        return known

    async def let_sleep(self, sleep: bool, timeout_s: float) -> list[str]:
        """Let all replicas sleep until the next version, or wake; returns the ones that do not within `timeout_s`."""
        self._sleep = sleep

        def late() -> set[str]:
            return self._live() - self._asleep if sleep else self._live() & self._asleep

        await self._notify()
        deadline = time.monotonic() + timeout_s
        while late() and self._sleep == sleep and time.monotonic() < deadline:
            await self._wait(lambda: not late() or self._sleep != sleep, _LOOK_S)
        return sorted(late())

    # What replicas call.

    async def watch(
        self, replica_id: str, since: Revision | None, report: dict[str, Any] | None = None, asleep: bool = False
    ) -> Changes | None:
        """What has changed since a revision (None: everything); None after a while without a change. `report` is a
        `ReplicaTally`'s."""
        self._seen[replica_id] = time.monotonic()
        if report is not None:
            self._reports[replica_id] = report
        if asleep != (replica_id in self._asleep):
            self._asleep ^= {replica_id}
            await self._notify()
        if not await self._wait(lambda: since != self._revision or asleep != self._sleep, POLL_S):
            return None
        self._seen[replica_id] = time.monotonic()
        known = since[1] if since is not None and since[0] == self._revision[0] else -1
        changed = {policy: tenant.newest for policy, tenant in self._tenants.items() if tenant.revision > known}
        present = frozenset(self._tenants) if self._settled else None
        return Changes(self._revision, changed, frozenset(self._left), present, self._sleep)

    async def ack(self, replica_id: str, policy: str, version: int, sha256: str) -> float:
        """A replica serves a version, whose bytes have this hash. Returns the seconds since its publication, or 0."""
        self._seen[replica_id] = time.monotonic()
        tenant = self._tenants.get(policy)
        known = tenant.reports.get(version) if tenant is not None else None
        if known is None or known.sha256 != sha256:
            return 0.0
        self._asleep.discard(replica_id)  # loading has woken it, and it says so later
        seconds = known.acked[replica_id] = time.monotonic() - known.published_at
        await self._notify()
        return seconds

    def _live(self) -> set[str]:
        now = time.monotonic()
        return {replica for replica, seen in self._seen.items() if now - seen < LIVE_WINDOW_S}

    async def status(self) -> dict[str, Any]:
        """The policies and their versions (`version`: the newest of all), and the live replicas' last reports."""
        live, now = self._live(), time.monotonic()
        self._reports = {replica: report for replica, report in self._reports.items() if replica in live}
        policies: dict[str, dict[str, Any]] = {
            policy: {
                "version": newest.version if (newest := tenant.newest) else 0,
                "sha256": newest.sha256 if newest else "",
                "folder": newest.folder if newest else "",
                "home": tenant.home,
                "lease_left_s": tenant.deadline - now,
            }
            for policy, tenant in self._tenants.items()
        }
        return {
            "version": max((policy["version"] for policy in policies.values()), default=0),
            "policies": policies,
            "replicas": sorted(live),
            "reports": dict(self._reports),
            "failure": self._failure,
        }


def shared_id(name: str) -> str:
    """The run id under which a shared service's application and registry are known."""
    return f"shared-{name}"


def app_name(run_id: str) -> str:
    """The Serve application of a run, or of a shared service."""
    return f"rl-vlm-{run_id}"


def registry_name(run_id: str) -> str:
    return f"rl-vlm-registry-{run_id}"


def start_registry(
    run_id: str, namespace: str, kind: type[VersionRegistry] = VersionRegistry, *arguments: Any, shared: bool = False
) -> ray.actor.ActorHandle:
    """Start the registry of a service on the caller's node; it restarts when it dies. That of a run's own service ends
    with the run and the node; of a `shared` one, the one that is there is taken."""
    node = ray.get_runtime_context().get_node_id()  # other nodes come and go
    actor = ray.remote(kind).options(
        name=registry_name(run_id),
        namespace=namespace,
        lifetime="detached" if shared else None,
        get_if_exists=shared,
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=MOST_CALLS,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=shared),
    )
    return actor.remote(*arguments)  # type: ignore[no-any-return]
