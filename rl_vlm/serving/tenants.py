"""The tenants of a service: each has one policy, the versions of that policy, and a lease. No Ray actor is needed here."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, field

from ray import ObjectRef

from rl_vlm.types import POLICY, RLVLMError

# Versions whose acknowledgements are kept: a replica may be slower than the learner.
_REMEMBERED = 32


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
    ref: ObjectRef
    policy: str = POLICY


@dataclass(slots=True)
class _Acknowledgements:
    """Of one version: replica id -> seconds from publication to its acknowledgement."""

    sha256: str
    published_at: float
    seconds: dict[str, float] = field(default_factory=dict)


class Versions:
    """The versions of one policy, whose numbers only grow, and which replicas have acknowledged them."""

    def __init__(self) -> None:
        self.newest: Published | None = None
        self._remembered: OrderedDict[int, _Acknowledgements] = OrderedDict()  # by version, oldest first

    def add(self, published: Published) -> bool:
        """Make a version the newest; False for a repeated call with an equal hash. Raises PublishError."""
        if self.newest is not None and published.version <= self.newest.version:
            if (published.version, published.sha256) == (self.newest.version, self.newest.sha256):
                return False
            raise PublishError(
                f"Version {published.version} cannot follow version {self.newest.version}: versions only grow."
            )
        self.newest = published
        self._remembered[published.version] = _Acknowledgements(published.sha256, time.monotonic())
        while len(self._remembered) > _REMEMBERED:
            self._remembered.popitem(last=False)
        return True

    def ack(self, replica_id: str, version: int, sha256: str) -> float:
        """Note that a replica serves a version; returns the seconds since its publication, 0 for an unknown version."""
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
        """Which of the live replicas have acknowledged a version."""
        acked = dict(self.acks(version))
        return PublishReport(version, acked, tuple(sorted(set(live) - acked.keys())))

    def acknowledged(self, live: Collection[str]) -> PublishReport | None:
        """The report of the newest version that any replica has; None before the first acknowledgement."""
        version = next((version for version in reversed(self._remembered) if self.acks(version)), None)
        return None if version is None else self.report(version, live)


@dataclass(slots=True, eq=False)
class Tenant:
    """One user of the service.

    `home`: the place of the replica that its calls go to first (see `router.homes_of`); -1 for a keeper, which has no policy and
    only keeps the service up. `deadline`: of its lease. `revision`: of its last change.
    """

    policy: str
    home: int
    deadline: float
    versions: Versions = field(default_factory=Versions)
    revision: int = 0

    @property
    def keeper(self) -> bool:
        """Whether it has no policy."""
        return self.home < 0


class Tenants:
    """All tenants by policy. Times are seconds of the caller's clock.

    Args:
        lease_s: how long a tenant stays without renewing its lease.
        now: the time of this call.
    """

    def __init__(self, lease_s: float, now: float) -> None:
        self._lease_s = lease_s
        self._tenants: dict[str, Tenant] = {}
        self._left: set[str] = set()
        self.revision = 0  # grows with every change
        self.empty_since = now

    def join(self, policy: str, keeper: bool, now: float) -> Tenant:
        """The tenant of this policy, new or known. Policies of different runs have different names."""
        if (known := self._tenants.get(policy)) is not None:
            known.deadline = now + self._lease_s
            return known
        taken = {tenant.home for tenant in self._tenants.values()}
        home = -1 if keeper else next(place for place in range(len(taken) + 1) if place not in taken)
        tenant = self._tenants[policy] = Tenant(policy, home, now + self._lease_s)
        self.touch(tenant)
        return tenant

    def touch(self, tenant: Tenant) -> None:
        """Note that a tenant has changed."""
        self.revision += 1
        tenant.revision = self.revision

    def get(self, policy: str) -> Tenant | None:
        """The tenant of a policy."""
        return self._tenants.get(policy)

    def renew(self, policy: str, now: float) -> bool:
        """Prolong a lease; False for a policy without a tenant."""
        tenant = self._tenants.get(policy)
        if tenant is not None:
            tenant.deadline = now + self._lease_s
        return tenant is not None

    def remove(self, policy: str, now: float) -> bool:
        """Forget a tenant and its versions; False for a policy without one."""
        if self._tenants.pop(policy, None) is None:
            return False
        self._left.add(policy)
        self.revision += 1
        if not self._tenants:
            self.empty_since = now
        return True

    def excuse(self, seconds: float) -> None:
        """Prolong all leases by a time in which the service could hear nobody."""
        for tenant in self._tenants.values():
            tenant.deadline += seconds

    def expired(self, now: float) -> list[Tenant]:
        """Tenants whose lease has ended."""
        return [tenant for tenant in self._tenants.values() if tenant.deadline < now]

    @property
    def left(self) -> frozenset[str]:
        """Policies that had a tenant and have none now."""
        return frozenset(self._left - self._tenants.keys())

    @property
    def policies(self) -> list[Tenant]:
        """Tenants with a policy."""
        return [tenant for tenant in self._tenants.values() if not tenant.keeper]

    def __len__(self) -> int:
        return len(self._tenants)
