"""SharedRegistry: the detached actor that owns a service which several runs share: its users, their versions, its replicas.

The first run makes it, whatever run that is, and the last one ends it. Users hold leases, so that a policy whose run has crashed is
collected. Replicas keep one call open (`watch`) and learn of every change at once; which adapters they load is their own affair.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rl_vlm.config import CommonConfig
from rl_vlm.models.reference import ModelReference, travelling_files
from rl_vlm.serving.members import Member, Members, wanted_replicas
from rl_vlm.serving.registry import LIVE_WINDOW_S, POLL_S, registry_name
from rl_vlm.serving.shared_types import SHARED_NAMESPACE, Changes, Entry, Revision, Welcome, shared_id
from rl_vlm.serving.terms import Terms
from rl_vlm.serving.version_line import Published, PublishReport, VersionLine, disk_thread

if TYPE_CHECKING:
    from rl_vlm.serving.deploying import IfFound

logger = logging.getLogger(__name__)

_FIRST_USER_S = 60.0  # how long a service waits for its first user
_LINGER_S = 2.0  # and how long after its last one, for a run that is about to come
_TICK_S = 1.0
_TELL_S = 5.0  # how long a service that could not start says why
_STALL_S = 2.0  # by which a tick is late where this process was stopped, or its machine did not get to it
_END_S = 120.0  # how long to try to delete the application
_FEWER_AFTER_S = 30.0  # how long fewer replicas must be wanted before one is stopped


class SharedRegistry:
    """The actor's class; `find_or_start` makes the actor. All methods are coroutines on one event loop."""

    def __init__(
        self,
        name: str,
        run: CommonConfig,
        model: ModelReference,
        folder: str,
        make_line: Callable[[Path, str], VersionLine] = VersionLine,
    ) -> None:
        self._name, self._run, self._model = name, run, model
        self._terms = Terms.of(run, model.digest)
        self._folder = Path(folder)
        now = time.monotonic()
        self._members = Members(self._folder, run.serving.sharing.lease_s, now, make_line)
        self._process = uuid.uuid4().hex
        self._opened_at = now
        self._reports: dict[str, dict[str, Any]] = {}  # replica -> its last report
        self._seen: dict[str, float] = {}  # replica -> when it last asked
        self._changed = asyncio.Condition()
        self._disk = disk_thread()
        self._replicas = 0  # that were asked for last
        self._fewer_since: float | None = None
        self._restored = self._had_users = len(self._members) > 0  # by an actor that was restarted: the replicas are up
        self._settled = self._restored  # whether who is not a member is gone, and has not just not joined again
        self._kept = False  # whether an application was found whose users have not all joined again
        self._failure = ""
        self._closing = False
        self._worker: asyncio.Task[None] | None = None

    def _ensure_working(self) -> None:
        if self._worker is None:  # there is no event loop before the first call
            self._worker = asyncio.create_task(self._work())

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    # What users call.

    async def join(self, policy: str, token: str, terms: Terms, keeper: bool = False) -> Welcome | str:
        """Take a user in; a repeated call changes nothing. The reason where it cannot be; an empty one: come again soon."""
        self._ensure_working()
        if self._closing:
            return self._failure
        if reason := self._terms.refusal(terms, self._name):
            return reason
        member = self._members.join(policy, token, keeper, time.monotonic())
        if member is None:
            return f"The shared service {self._name!r} has or had a policy {policy!r} of another run."
        self._had_users = True
        await self._notify()
        return Welcome(member.seat)

    async def renew(self, policy: str, token: str) -> bool:
        """Prolong a lease; False: it had ended, so join again and publish the newest version again."""
        self._ensure_working()
        return self._members.renew(policy, token, time.monotonic())

    async def leave(self, policy: str, token: str) -> None:
        """A user is done. Its versions are forgotten everywhere."""
        if (member := self._members.opened(policy, token)) is not None:
            self._members.remove(member, time.monotonic())
            await self._notify()

    async def publish(self, published: Published, token: str) -> bool:
        """Make a version the newest of its policy; False: its lease had ended. Raises PublishError."""
        member = self._members.opened(published.policy, token)
        if member is None:
            return False
        self._members.renew(published.policy, token, time.monotonic())
        if member.line.add(published):
            self._members.touch(member)
            await self._notify()
            await member.line.persist(published, self._disk)
        return True

    async def acknowledged(self, policy: str, token: str) -> PublishReport | None:
        """Who has acknowledged the policy's newest version that any replica has. Replicas load what they are asked for only."""
        member = self._members.opened(policy, token)
        return None if member is None else member.line.acknowledged(())

    async def newest_version(self, policy: str, token: str) -> int:
        """The newest version of a policy; 0 before its first publication."""
        member = self._members.opened(policy, token)
        return member.line.newest.version if member is not None and member.line.newest else 0

    # What replicas call.

    async def model_files(self) -> Mapping[str, bytes]:
        """What other nodes need of the model (`travelling_files`), by file name."""
        return await asyncio.get_running_loop().run_in_executor(self._disk, travelling_files, self._model.folder)

    async def watch(
        self, replica_id: str, since: Revision | None, report: dict[str, Any] | None = None, at_once: bool = False
    ) -> Changes | None:
        """What has changed since a revision (None: everything); None after a while without a change."""
        self._ensure_working()
        self._seen[replica_id] = time.monotonic()
        if report is not None:
            self._reports[replica_id] = report
        if not at_once and not self._newer(since):
            try:
                async with asyncio.timeout(POLL_S), self._changed:
                    await self._changed.wait_for(lambda: self._newer(since))
            except TimeoutError:
                return None
        self._seen[replica_id] = time.monotonic()
        known = since[1] if since is not None and since[0] == self._process else -1
        members = self._members.policies
        entries = {m.policy: Entry(m.lock, m.line.newest) for m in members if m.revision > known}
        present = frozenset(member.policy for member in members)
        gone = None if self._settled else self._members.names - present
        return Changes((self._process, self._members.revision), entries, present, gone)

    def _newer(self, since: Revision | None) -> bool:
        return since != (self._process, self._members.revision)

    async def ack(self, replica_id: str, policy: str, version: int, sha256: str) -> float:
        """A replica has loaded a version; returns the seconds since its publication, 0 for one that is not known."""
        found = [member for member in self._members if member.policy == policy]
        return found[0].line.ack(replica_id, version, sha256) if found else 0.0

    # What anybody may ask.

    async def status(self) -> dict[str, Any]:
        """The policies and their versions, and the reports of the replicas that asked lately."""
        now = time.monotonic()
        live = {replica for replica, seen in self._seen.items() if now - seen < LIVE_WINDOW_S}
        self._reports = {replica: report for replica, report in self._reports.items() if replica in live}
        return {
            "name": self._name,
            "failure": self._failure,
            "closing": self._closing,
            "policies": {m.policy: self._about(m, now) for m in self._members.policies},
            "keepers": len(self._members) - len(self._members.policies),
            "wanted_replicas": self._replicas,
            "replicas": sorted(live),
            "reports": dict(self._reports),
        }

    @staticmethod
    def _about(member: Member, now: float) -> dict[str, Any]:
        newest = member.line.newest
        return {
            "version": newest.version if newest else 0,
            "sha256": newest.sha256 if newest else "",
            "seat": member.seat,
            "lease_left_s": member.deadline - now,
        }

    # What it does by itself.

    async def _work(self) -> None:
        """Start the replicas, collect users that are gone, follow the number of policies, and end."""
        while not self._closing:
            try:
                now = time.monotonic()
                await self._settle(now)
                for member in self._members.expired(now):
                    logger.warning("policy %s is dropped: its run has not been heard of", member.policy)
                    self._members.remove(member, now)
                    await self._notify()
                if self._is_over(now):
                    break
                await self._scale(now)
            except Exception as error:
                # A full disk, a controller that is being restarted: each may be over at the next attempt.
                logger.warning("shared service %s: %r", self._name, error)
                if not (self._replicas or self._restored or self._kept):  # never started: whoever joined is told
                    self._failure = f"The shared service {self._name!r} could not be started: {error}"
                    break
            await self._tick()
        await self._end()

    async def _settle(self, now: float) -> None:
        """After the length of a lease every user of an earlier process has joined again."""
        if not self._settled and now - self._opened_at >= self._run.serving.sharing.lease_s:
            self._settled = True
            if self._kept:
                self._replicas = 0  # their number is set anew
            self._members.revision += 1
            await self._notify()

    async def _tick(self) -> None:
        """Wait. Where that took much longer than it should, what users have sent meanwhile is not read yet: none is late."""
        clock = asyncio.get_running_loop().time
        began = clock()
        await asyncio.sleep(_TICK_S)
        if (late := clock() - began - _TICK_S) > _STALL_S:
            self._members.excuse(late)

    def _is_over(self, now: float) -> bool:
        if len(self._members):
            return False
        patience = _LINGER_S if self._had_users else _FIRST_USER_S
        return now - max(self._members.empty_since, self._opened_at) >= patience

    async def _scale(self, now: float) -> None:
        wanted = wanted_replicas(self._run.serving, len(self._members.policies))
        if wanted >= self._replicas:
            self._fewer_since = None
        elif self._fewer_since is None:
            self._fewer_since = now
        if wanted > self._replicas or (self._fewer_since is not None and now - self._fewer_since >= _FEWER_AFTER_S):
            from rl_vlm.serving.deploying import deploy_shared

            await asyncio.to_thread(deploy_shared, self._model, self._run, self._name, wanted, self._if_found())
            self._replicas, self._fewer_since = wanted, None

    def _if_found(self) -> IfFound:
        """What becomes of an application that is there."""
        if self._settled or self._replicas:
            return "keep" if self._kept and not self._settled else "resize"
        # It is an earlier process's of this actor, whose users join again; or another service left it, perhaps with another model.
        self._kept = True  # also where the cluster does not say
        self._kept = _was_restarted()
        return "keep" if self._kept else "replace"

    async def _end(self) -> None:
        """Delete the application, then this actor. Runs that come meanwhile are told to come again."""
        self._closing = True
        if self._failure:
            await asyncio.sleep(_TELL_S)
        from rl_vlm.serving.deploying import delete_shared

        deadline = time.monotonic() + _END_S
        while True:
            try:
                await asyncio.to_thread(delete_shared, self._name)
                break
            except (
                Exception
            ) as error:  # its controller is being restarted, or Serve is gone: replicas then end by themselves
                logger.warning("shared service %s is not deleted: %r", self._name, error)
                if time.monotonic() > deadline:
                    break
            await asyncio.sleep(_TICK_S)
        shutil.rmtree(self._folder, ignore_errors=True)
        ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def _was_restarted() -> bool:
    """Whether this process continues an actor that died. Asks the cluster."""
    return bool(ray.get_runtime_context().was_current_actor_reconstructed)


def find_or_start(name: str, run: CommonConfig, model: ModelReference, folder: Path) -> ray.actor.ActorHandle:
    """The registry of this name on the cluster, or a new one on this node; `folder` is then its own, for its restarts."""
    actor = ray.remote(SharedRegistry).options(
        name=registry_name(shared_id(name)),
        namespace=SHARED_NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_concurrency=1000,
        # Beside its folder and the model's, as long as this node is there: users publish again where it starts without them.
        scheduling_strategy=NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True),
    )
    return actor.remote(name, run, model, str(folder))  # type: ignore[no-any-return]
