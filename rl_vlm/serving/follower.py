"""Follower: keeps one engine at the versions that the registry announces, and retries after any failure.

A run's own replicas load each version as soon as it is published, and the first one before they take requests. Replicas that several
runs share load a policy when a request asks for it; a policy that was asked for since its last load is loaded as soon as it is
published, so that its next request need not wait.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from rl_vlm.coroutines import repeat
from rl_vlm.engines.base import BASE_MODEL, Engine
from rl_vlm.serving.lifecycle import Lifecycle
from rl_vlm.serving.metrics import ReplicaTally
from rl_vlm.serving.registry import POLL_S, Changes, Revision
from rl_vlm.serving.tenants import Published
from rl_vlm.types import RLVLMError, UserInputError

logger = logging.getLogger("ray.serve")

_ANSWER_S = 10.0  # how long the registry may take for an immediate answer
_ABANDONED_S = 60.0  # a registry that restarts is there again sooner
_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 2.0  # between loads that fail


class NotLoadedError(RLVLMError):
    """A version cannot be loaded here."""


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
        """Whether there is a newer version than the loaded one."""
        return self.newest is not None and self.newest.version > self.loaded

    def serves(self, min_version: int) -> bool:
        """Whether a request for at least this version may start. A policy that has a version is never served without one."""
        return self.loaded >= min_version and not (self.loaded == 0 and self.behind)


class Follower:
    """Follows a registry for one engine.

    Args:
        replica_id: by which the registry knows this replica.
        engine: what versions are loaded into.
        life: hears of the start, of sleep, and of loads that fail.
        tally: its report goes to the registry; the seconds of the last publication come back into it.
        find_registry: returns the registry's actor handle; raises ValueError when there is none of its name.
        abandoned: called when there has been none for a minute: the service has ended without stopping its replicas.
        load_timeout_s: how long fetching, and then loading, one version may take.
        changed: is notified after each change that requests may wait for.
        eager: load every version as soon as it is published.
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
        changed: asyncio.Condition,
        eager: bool,
        forget: Callable[[str], None] = lambda policy: None,
    ) -> None:
        self._replica_id = replica_id
        self._engine, self._life, self._tally = engine, life, tally
        self._find_registry, self._abandoned = find_registry, abandoned
        self._load_timeout_s = load_timeout_s
        self._changed, self._eager, self._forget = changed, eager, forget
        self.policies: dict[str, FollowedPolicy] = {}
        self._since: Revision | None = None
        self._missing_since: float | None = None
        self._one_load = asyncio.Lock()
        self._work: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Follow until cancelled. No failure ends it: `life` says how long failures may go on."""
        try:  # a registry that restarts may be back at the next attempt
            await repeat(self._catch_up, logger, f"replica {self._replica_id} cannot follow the registry")
        finally:
            for task in self._work:
                task.cancel()

    def _registry(self) -> Any:
        """The registry's handle. Raises ValueError; calls `abandoned` when there has been none for a minute."""
        try:
            found = self._find_registry()
        except ValueError:
            now = time.monotonic()
            if self._missing_since is None:
                self._missing_since = now
            elif now - self._missing_since >= _ABANDONED_S:
                self._missing_since = None  # asked for again if it did not help
                self._abandoned()
            raise
        self._missing_since = None
        return found

    async def _catch_up(self) -> None:
        registry = self._registry()
        report = self._tally.report(self._engine.stats(), self._engine.version, self._life.state)
        report["loaded"] = {name: policy.loaded for name, policy in self.policies.items()}
        first = not self._life.started
        # Each wait has a deadline: an answer of a dead process may never arrive, and no error be raised.
        async with asyncio.timeout(_ANSWER_S + (0.0 if first else POLL_S)):
            changes: Changes | None = await registry.watch.remote(
                self._replica_id, self._since, report, self._life.asleep, at_once=first
            )
        if changes is not None:
            self._note(changes)
        if first:
            await self._start()
        elif changes is not None and changes.sleep != self._life.asleep:
            await self._sleep(changes.sleep)
        await self._notify()

    def _note(self, changes: Changes) -> None:
        self._since = changes.revision
        for name in list(self.policies):
            if name in changes.left or (changes.present is not None and name not in changes.present):
                self._spawn(self._drop(self.policies.pop(name)))
        for name, newest in changes.newest.items():
            policy = self.policies.setdefault(name, FollowedPolicy(name, in_use=self._eager))
            if newest != policy.newest:
                policy.newest, policy.error = newest, ""
            if policy.in_use and policy.behind:
                self._load_soon(policy)

    async def _start(self) -> None:
        """Let requests come, once what must be loaded before is loaded."""
        if self._eager:
            loads = [policy.loading for policy in self.policies.values() if policy.loading is not None]
            if loads:
                await asyncio.wait(loads, timeout=1.0)
            if not self.policies or any(policy.behind for policy in self.policies.values()):
                await asyncio.sleep(_PAUSE_S)  # its run may not have joined yet
                return
        self._life.start()

    async def _sleep(self, asleep: bool) -> None:
        """Sleep, or wake. The registry hears of it with the next question."""
        async with self._one_load:
            if asleep == self._life.asleep:
                return  # a version that came meanwhile has woken it
            self._life.asleep = True  # from now on requests wait, so that the running ones come to an end
            reached = not asleep
            try:
                async with asyncio.timeout(self._load_timeout_s):
                    await (self._engine.sleep() if asleep else self._engine.wake())
                reached = asleep
            finally:
                self._life.asleep = reached

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def serves(self, name: str, min_version: int) -> bool:
        """Whether a request for this version of this policy may start now; a newer version is then loaded soon.

        Raises NotLoadedError when the version cannot be loaded.
        """
        policy = self.policies.get(name)  # its run may join in a moment
        if policy is None or min_version == BASE_MODEL:
            return policy is not None
        policy.in_use = True
        if policy.behind:
            self._load_soon(policy)
        if policy.serves(min_version):
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
        """Load the newest version of a policy. After a failure try again, or wait for the next request where loads are not eager."""
        pause = _PAUSE_S
        try:
            while policy.behind and self.policies.get(policy.name) is policy:
                try:
                    await self._load_newest(policy)
                except Exception as error:
                    version = policy.newest and policy.newest.version
                    policy.error = f"Version {version} of policy {policy.name} could not be loaded: {error!r}"
                    logger.warning("replica %s: %s", self._replica_id, policy.error)
                    await self._notify()
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE_S)
                    if not self._eager:
                        return
        finally:
            policy.loading = None

    async def _load_newest(self, policy: FollowedPolicy) -> None:
        """Fetch and load the newest version."""
        published = policy.newest
        assert published is not None
        # Before it is this load's turn: the bytes of a run whose node is cut off may never come, and others must not wait for
        # them. It fails where the run that owns them has crashed, which is not this replica's fault.
        async with asyncio.timeout(self._load_timeout_s):
            payload = await published.ref
        async with self._one_load:
            if self.policies.get(policy.name) is not policy or policy.newest != published:
                return  # the policy is gone, or has a newer version by now
            try:
                async with asyncio.timeout(self._load_timeout_s):
                    if self._life.asleep:
                        await self._engine.wake()
                        self._life.asleep = False
                    await self._engine.load_adapter(payload)
            except Exception as error:
                # A wrong version fails in a new replica as well; other failures may not.
                reason = f"Version {published.version} could not be loaded: {error!r}"
                self._life.fail_load(reason, time.monotonic(), curable=not isinstance(error, UserInputError))
                raise
            policy.loaded, policy.error, policy.in_use = published.version, "", self._eager
            self._life.load()
            if self.policies.get(policy.name) is not policy:
                await self._engine.drop_policy(policy.name)
        await self._notify()
        self._spawn(self._acknowledge(published))

    async def _acknowledge(self, published: Published) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                seconds = await self._registry().ack.remote(
                    self._replica_id, published.policy, published.version, published.sha256
                )
        except Exception as error:  # only a metric
            logger.warning("version %d of %s is not acknowledged: %r", published.version, published.policy, error)
            return
        self._tally.publish_s = seconds or self._tally.publish_s

    async def _drop(self, policy: FollowedPolicy) -> None:
        async with self._one_load:
            if policy.name not in self.policies or not self.policies[policy.name].loaded:
                await self._engine.drop_policy(policy.name)
        self._forget(policy.name)
