"""The policies of one replica that several runs share: who may use which, and which versions its engine has loaded.

Adapters are loaded when they are asked for, one at a time: of eight policies on two replicas each replica loads its four. A policy that was
asked for since its last load is loaded as soon as it is published, so that its next request need not wait.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from rl_vlm.coroutines import repeat
from rl_vlm.engines.base import BASE_MODEL, Engine
from rl_vlm.serving.follower import REGISTRY_ANSWER_S, RegistryLookup
from rl_vlm.serving.lifecycle import Lifecycle
from rl_vlm.serving.metrics import ReplicaTally
from rl_vlm.serving.policy_key import PolicyRefusedError, opens
from rl_vlm.serving.registry import POLL_S
from rl_vlm.serving.shared_types import Changes, Revision
from rl_vlm.serving.version_line import Published
from rl_vlm.types import RLVLMError, UserInputError

logger = logging.getLogger("ray.serve")

_PAUSE_S = 0.1  # after a load that failed


class NotLoadedError(RLVLMError):
    """A version cannot be loaded here."""


@dataclass(slots=True, eq=False)
class ShelvedPolicy:
    """One policy: the lock of its token, its newest published version, and the one that the engine has."""

    name: str
    lock: str
    newest: Published | None = None
    loaded: int = 0
    in_use: bool = False  # it was asked for since its last load
    error: str = ""  # why its newest version is not loaded, while that keeps failing
    loading: asyncio.Task[None] | None = None

    @property
    def behind(self) -> bool:
        """Whether there is a newer version than the loaded one."""
        return self.newest is not None and self.newest.version > self.loaded

    def serves(self, min_version: int) -> bool:
        """Whether a request for at least this version may start. A policy that has an adapter is never served without one."""
        return self.loaded >= min_version and not (self.loaded == 0 and self.behind)


class PolicyShelf:
    """Follows a shared registry for one engine.

    Args:
        replica_id: by which the registry knows this replica.
        engine: what adapters are loaded into.
        life: is started with the first answer of the registry; dies when nothing can be loaded for long.
        tally: its report goes to the registry; seconds of publications come back into it.
        find_registry: returns the registry's actor handle; raises ValueError when there is none of its name.
        abandoned: called when there has been none for a minute: the service has ended without stopping its replicas.
        load_timeout_s: how long fetching and loading one version may take.
        notify: called after each change of `life`.
        forget: called with the name of a policy that is gone.
    """

    def __init__(
        self,
        replica_id: str,
        engine: Engine,
        life: Lifecycle,
        tally: ReplicaTally,
        *,
        find_registry: Callable[[], Any],
        abandoned: Callable[[], None],
        load_timeout_s: float,
        notify: Callable[[], Awaitable[None]],
        forget: Callable[[str], None] = lambda policy: None,
    ) -> None:
        self._replica_id = replica_id
        self._engine, self._life, self._tally = engine, life, tally
        self._find_registry = RegistryLookup(find_registry, abandoned)
        self._load_timeout_s = load_timeout_s
        self._notify_server, self._forget = notify, forget
        self.policies: dict[str, ShelvedPolicy] = {}
        self._since: Revision | None = None
        self._one_load = asyncio.Lock()
        self._changed = asyncio.Condition()
        self._work: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Follow until cancelled. No failure ends it."""
        try:  # a registry that restarts may be back at the next attempt
            await repeat(self._catch_up, logger, f"replica {self._replica_id} cannot follow the registry")
        finally:
            for task in self._work:
                task.cancel()

    async def _catch_up(self) -> None:
        registry = self._find_registry()
        report = self._tally.report(self._engine.stats(), self._engine.version, self._life.state)
        report["loaded"] = {name: policy.loaded for name, policy in self.policies.items()}
        first = not self._life.started
        # Each wait has a deadline: an answer of a dead process may never arrive, and no error be raised.
        async with asyncio.timeout(REGISTRY_ANSWER_S + (0.0 if first else POLL_S)):
            changes: Changes | None = await registry.watch.remote(self._replica_id, self._since, report, at_once=first)
        if changes is not None:
            self._take(changes)
        if first:
            self._life.start()
            await self._notify_server()
        await self._notify()

    async def _refresh(self) -> None:
        """Ask the registry now, beside the call that is open."""
        try:
            async with asyncio.timeout(REGISTRY_ANSWER_S):
                self._take(await self._find_registry().watch.remote(self._replica_id, self._since, at_once=True))
        except Exception as error:
            # What is known stays known.
            logger.warning("replica %s cannot ask the registry: %r", self._replica_id, error)

    def _take(self, changes: Changes) -> None:
        if self._since is not None and self._since[0] == changes.revision[0] and self._since[1] > changes.revision[1]:
            return  # an answer that was overtaken by a later one
        self._since = changes.revision
        gone = self.policies.keys() - changes.present
        for name in gone if changes.gone is None else gone & changes.gone:
            self._spawn(self._drop(self.policies.pop(name)))
        for name, entry in changes.entries.items():
            policy = self.policies.get(name)
            if policy is not None and policy.lock != entry.lock:  # another run's, of the same name
                self._spawn(self._drop(policy))
                policy = None
            if policy is None:
                policy = self.policies[name] = ShelvedPolicy(name, entry.lock)
            policy.newest = entry.newest
            if policy.in_use and policy.behind:
                self._load_soon(policy)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def open(self, name: str, token: str, min_version: int) -> None:
        """Return once a request for this version of this policy may start.

        Raises PolicyRefusedError when the token does not open the policy, NotLoadedError when the version cannot be loaded, and
        TimeoutError when either is not there in time.
        """
        async with asyncio.timeout(self._load_timeout_s):
            # Again where the policy went meanwhile: its lease may have ended, and its run joins anew.
            while not await self._serves(await self._known(name, token), min_version):
                pass

    async def _known(self, name: str, token: str) -> ShelvedPolicy:
        """The policy of this name once there is one. Raises PolicyRefusedError when the token does not open it."""
        while (policy := self.policies.get(name)) is None:
            await self._wait()  # its run may have joined a moment ago
        if not opens(token, policy.lock):
            await self._refresh()  # its run may have left, and another one of that name have joined
            policy = self.policies.get(name, policy)
        if not opens(token, policy.lock):
            self._tally.refused += 1
            raise PolicyRefusedError(f"The token does not open policy {name!r} of these shared replicas.")
        return policy

    async def _serves(self, policy: ShelvedPolicy, min_version: int) -> bool:
        """Wait until a request for this version may start; False where the policy is not here any more. Raises NotLoadedError."""
        if min_version == BASE_MODEL:
            return True
        policy.in_use = True
        while not policy.serves(min_version):
            if self.policies.get(policy.name) is not policy:
                return False
            if policy.behind:
                await asyncio.wait({self._load_soon(policy)})  # which goes on if this request is cancelled
                if policy.error:
                    raise NotLoadedError(policy.error)
            else:
                await self._wait()  # its run may be publishing
        if policy.behind:
            self._load_soon(policy)
        return self.policies.get(policy.name) is policy

    async def _wait(self) -> None:
        async with self._changed:
            await self._changed.wait()

    # Loading.

    def _load_soon(self, policy: ShelvedPolicy) -> asyncio.Task[None]:
        if policy.loading is None:
            policy.loading = self._spawn(self._load(policy))
        return policy.loading

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    async def _load(self, policy: ShelvedPolicy) -> None:
        """Load the newest version of a policy, and note why it failed if it did."""
        try:
            published = await self._load_newest(policy)
        except Exception as error:
            version = policy.newest and policy.newest.version
            policy.error = f"Version {version} of policy {policy.name} could not be loaded: {error!r}"
            logger.warning("replica %s: %s", self._replica_id, policy.error)
            await asyncio.sleep(_PAUSE_S)
            return
        finally:
            policy.loading = None
            await self._notify()
        if published is not None:
            await self._acknowledge(published)

    async def _load_newest(self, policy: ShelvedPolicy) -> Published | None:
        """Fetch and load the newest version, and return it; None where the policy went meanwhile."""
        while (published := policy.newest) is not None:
            # Before it is this load's turn: the bytes of a run whose node is cut off may never come, and others must not wait for
            # them. It fails where the run that owns them has crashed, which is not this replica's fault.
            async with asyncio.timeout(self._load_timeout_s):
                payload = await published.ref
            async with self._one_load:
                if self.policies.get(policy.name) is not policy:
                    return None
                if policy.newest is None or policy.newest.version <= published.version:
                    await self._load_payload(policy, published, payload)
                    return published
        return None

    async def _load_payload(self, policy: ShelvedPolicy, published: Published, payload: Any) -> None:
        try:
            async with asyncio.timeout(self._load_timeout_s):
                await self._engine.load_adapter(payload)
        except UserInputError:
            raise  # a wrong adapter is its run's affair
        except Exception as error:
            self._life.fail_load(f"No adapter can be loaded: {error!r}", time.monotonic())
            raise
        policy.loaded, policy.error, policy.in_use = published.version, "", False
        self._life.load(self._life.loaded)  # loading works here, whatever failed before
        if self.policies.get(policy.name) is not policy:
            await self._engine.drop_policy(policy.name)

    async def _acknowledge(self, published: Published) -> None:
        try:
            async with asyncio.timeout(REGISTRY_ANSWER_S):
                seconds = await self._find_registry().ack.remote(
                    self._replica_id, published.policy, published.version, published.sha256
                )
        except Exception as error:  # a figure, no more
            logger.warning("version %d of %s is not acknowledged: %r", published.version, published.policy, error)
            return
        self._tally.publish_s = seconds or self._tally.publish_s

    async def _drop(self, policy: ShelvedPolicy) -> None:
        async with self._one_load:
            if policy.name not in self.policies or not self.policies[policy.name].loaded:
                await self._engine.drop_policy(policy.name)
        self._forget(policy.name)
