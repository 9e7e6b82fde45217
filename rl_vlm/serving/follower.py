"""Follower: keeps one engine at the versions that the registry announces, and retries after any failure.

A run's own replicas load each version as soon as it is published, and the first one before they take requests. Replicas
that several runs share load a policy when a request asks for it; a policy that was asked for since its last load is
loaded as soon as it is published, so that its next request need not wait.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from rl_vlm.engines.base import BASE_MODEL, Engine
from rl_vlm.serving.counters import ReplicaTally
from rl_vlm.serving.health import Lifecycle
from rl_vlm.serving.registry import POLL_S, Changes, Published, Revision
from rl_vlm.types import RLVLMError, UserInputError

logger = logging.getLogger("ray.serve")

_ANSWER_S = 10.0  # how long the registry may take for an immediate answer
_ABANDONED_S = 60.0  # a registry that restarts is there again sooner
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0  # between attempts that fail: to follow, or to load


class NotLoadedError(RLVLMError):
    """A version cannot be loaded here.

    Do: see that all nodes have the files of the adapter.
    """


@dataclass(slots=True, eq=False)
class FollowedPolicy:
    """One policy: its newest published version, and the one that the engine has."""

    name: str
    in_use: bool  # a request has asked for it since its last load, or all versions are loaded
    newest: Published | None = None
    loaded: int = 0
    error: str = ""  # why its newest version is not loaded, while that keeps failing
    loading: asyncio.Task[None] | None = None

    @property
    def behind(self) -> bool:
        return self.newest is not None and self.newest.version > self.loaded


@dataclass(slots=True, eq=False)
class Follower:
    """Follows a registry for one engine."""

    replica_id: str  # by which the registry knows this replica
    engine: Engine
    life: Lifecycle  # learns when the replica starts, sleeps, or fails to load a version
    tally: ReplicaTally  # its report goes to the registry; the seconds of the last publication come back into it
    _: KW_ONLY
    find_registry: Callable[[], Any]  # the registry's actor handle; ValueError when there is none of its name
    abandoned: Callable[[], None]  # called when no registry was found for a minute: the service ended
    load_timeout_s: float  # how long fetching, and then loading, one version may take
    changed: asyncio.Condition  # is notified after each change that requests may wait for
    eager: bool  # load every version as soon as it is published
    forget: Callable[[str], None] = lambda policy: None  # called with the name of a policy that is gone
    policies: dict[str, FollowedPolicy] = field(default_factory=dict)
    _since: Revision | None = None
    _missing_since: float | None = None
    _one_load: asyncio.Lock = field(default_factory=asyncio.Lock)
    _work: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self) -> None:
        """Follow until cancelled. No failure ends it: `life` says how long failures may go on."""
        pause = _PAUSE_S
        try:
            while True:
                try:
                    await self._catch_up()
                    pause = _PAUSE_S
                except Exception as error:  # a registry that restarts may be back at the next attempt
                    logger.warning("replica %s cannot follow the registry: %r", self.replica_id, error)
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE_S)
        finally:
            for task in self._work:
                task.cancel()

    async def _registry(self) -> Any:
        """The registry's handle. Raises ValueError; calls `abandoned` when there has been none for a minute."""
        try:
            found = await asyncio.to_thread(self.find_registry)  # it may hang with the cluster
        except ValueError:
            now = time.monotonic()
            if self._missing_since is None:
                self._missing_since = now
            elif now - self._missing_since >= _ABANDONED_S:
                self._missing_since = None  # asked for again if it did not help
                self.abandoned()
            raise
        self._missing_since = None
        return found

    async def _catch_up(self) -> None:
        registry = await self._registry()
        report = self.tally.report(self.engine.stats(), self.engine.version, self.life.state)
        asked = registry.watch.remote(self.replica_id, self._since, report, self.life.asleep)
        # Each wait has a deadline: an answer of a dead process may never arrive, and no error be raised.
        async with asyncio.timeout(_ANSWER_S + POLL_S):
            changes: Changes | None = await asked
        if changes is not None:
            self._note(changes)
            if changes.sleep != self.life.asleep:
                await self._sleep(changes.sleep)
        await self._notify()

    def _note(self, changes: Changes) -> None:
        self._since = changes.revision
        for name in list(self.policies):
            if name in changes.left or (changes.present is not None and name not in changes.present):
                self._spawn(self._drop(self.policies.pop(name)))
        for name, newest in changes.newest.items():
            policy = self.policies.setdefault(name, FollowedPolicy(name, in_use=self.eager))
            if newest != policy.newest:
                policy.newest, policy.error = newest, ""
            if policy.in_use and policy.behind:
                self._load_soon(policy)

    async def _sleep(self, asleep: bool) -> None:
        """Sleep, or wake. The next call of `watch` reports it."""
        async with self._one_load:
            if asleep == self.life.asleep:
                return  # a version that came meanwhile has woken it
            self.life.asleep = True  # from now on requests wait, so that the running ones come to an end
            reached = not asleep
            try:
                async with asyncio.timeout(self.load_timeout_s):
                    await (self.engine.sleep() if asleep else self.engine.wake())
                reached = asleep
            finally:
                self.life.asleep = reached

    async def _notify(self) -> None:
        """Let requests come once what must be loaded before is loaded, and look again at waiting ones."""
        known = self.policies.values()
        if not self.eager or (known and not any(policy.behind for policy in known)):  # `known` fills as the run joins
            self.life.started = True
        async with self.changed:
            self.changed.notify_all()

    def serves(self, name: str, min_version: int) -> bool:
        """Whether a request for this version may start now; a newer one is then loaded soon. Raises NotLoadedError."""
        policy = self.policies.get(name)  # None until its run has joined
        if policy is None or min_version == BASE_MODEL:
            return policy is not None
        policy.in_use = True
        if policy.behind:
            self._load_soon(policy)
        # A policy that has a version is never served without one.
        if policy.loaded >= min_version and not (policy.loaded == 0 and policy.behind):
            return True
        if policy.error:
            raise NotLoadedError(policy.error)
        return False

    # Loading.

    def _load_soon(self, policy: FollowedPolicy) -> None:
        if policy.loading is None:
            policy.loading = self._spawn(self._load(policy))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)
        return task

    async def _load(self, policy: FollowedPolicy) -> None:
        """Load the newest version of a policy. After a failure try again; without eager loads when asked."""
        pause = _PAUSE_S
        try:
            while policy.behind and self.policies.get(policy.name) is policy:
                try:
                    await self._load_newest(policy)
                except Exception as error:
                    version = policy.newest and policy.newest.version
                    policy.error = f"Version {version} of policy {policy.name} could not be loaded: {error!r}"
                    logger.warning("replica %s: %s", self.replica_id, policy.error)
                    await self._notify()
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE_S)
                    if not self.eager:
                        return
        finally:
            policy.loading = None

    async def _load_newest(self, policy: FollowedPolicy) -> None:
        published = policy.newest
        assert published is not None
        # Before it is this load's turn: the bytes of a run whose node is cut off may never come, and others must not
        # wait for them. It fails where the run that owns them has crashed, which is not this replica's fault.
        async with asyncio.timeout(self.load_timeout_s):
            payload = await published.ref
        async with self._one_load:
            if self.policies.get(policy.name) is not policy or policy.newest != published:
                return  # the policy is gone, or has a newer version by now
            try:
                async with asyncio.timeout(self.load_timeout_s):
                    if self.life.asleep:
                        await self.engine.wake()
                        self.life.asleep = False
                    await self.engine.load_adapter(payload)
            except Exception as error:
                # A wrong version fails in a new replica as well; other failures may not.
                reason = f"Version {published.version} could not be loaded: {error!r}"
                self.life.fail_load(reason, time.monotonic(), curable=not isinstance(error, UserInputError))
                raise
            policy.loaded, policy.error, policy.in_use = published.version, "", self.eager
            self.life.load()
            if self.policies.get(policy.name) is not policy:
                await self.engine.drop_policy(policy.name)
        await self._notify()
        self._spawn(self._acknowledge(published))

    async def _acknowledge(self, published: Published) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                seconds = await (await self._registry()).ack.remote(
                    self.replica_id, published.policy, published.version, published.sha256
                )
        except Exception as error:  # only a metric
            logger.warning("version %d of %s is not acknowledged: %r", published.version, published.policy, error)
            return
        self.tally.publish_s = seconds or self.tally.publish_s

    async def _drop(self, policy: FollowedPolicy) -> None:
        if policy.error:
            self.life.load()  # what could not be loaded need not be any more
        async with self._one_load:
            if policy.name not in self.policies or not self.policies[policy.name].loaded:
                await self.engine.drop_policy(policy.name)
        self.forget(policy.name)
