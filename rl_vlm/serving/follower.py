"""Follower: keeps one engine at the versions that the registry announces, and retries after any failure.

A run's own replicas load each version as soon as it is published, and the first one before they take requests. Replicas
that several runs share load a policy when a request asks for it; a policy that was asked for since its last load is
loaded as soon as it is published, so that its next request need not wait.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from dataclasses import KW_ONLY, asdict, dataclass, field
from enum import StrEnum
from typing import Any

from ray.util import metrics

from rl_vlm.engines.base import BASE_MODEL, Engine, EngineStats
from rl_vlm.serving.registry import POLL_S, Changes, Published, Revision
from rl_vlm.types import RLVLMError, UserInputError

# The state machine of a replica, without Ray and without a clock of its own.


class ReplicaState(StrEnum):
    STARTING = "starting"  # it has not asked the registry yet, or not loaded what it must have before it serves
    SERVING = "serving"
    SUSPECT = "suspect"  # its engine did not answer a probe in time; requests go elsewhere until it does
    DEAD = "dead"  # it must be replaced


@dataclass(slots=True)
class Lifecycle:
    """The facts about one replica, from which its state is computed. Times are seconds of any monotonic clock."""

    probe_after_s: float  # an engine without progress for this long is probed
    load_patience_s: float = 60.0  # a replica whose loads fail for this long is dead
    max_failed_probes: int = 2  # in a row, after which the replica is dead
    started: bool = False  # it has asked the registry, and loaded what it must have before it serves
    asleep: bool = False  # its engine has given memory away, and takes no requests until it has it again
    failed_probes: int = 0
    load_error: str = ""  # why a version is not loaded, while loads keep failing
    death: str = ""  # why, once it is dead
    last_progress: float = float("-inf")
    _failing_since: float | None = None
    _progress: int = -1

    @property
    def state(self) -> ReplicaState:
        """Dead wins over suspect, suspect over starting."""
        if self.death:
            return ReplicaState.DEAD
        if self.failed_probes:
            return ReplicaState.SUSPECT
        return ReplicaState.SERVING if self.started else ReplicaState.STARTING

    @property
    def refuses(self) -> bool:
        """Whether requests go elsewhere. Where a first load fails, another replica may have started already."""
        return bool(self.death or self.failed_probes or (self.load_error and not self.started))

    @property
    def ready(self) -> bool:
        """Whether a request may start now, if its version is there. Else it waits for the start, or for the engine."""
        return self.started and not self.asleep and not self.refuses

    def load(self) -> None:
        """A version was loaded, so loading works."""
        self.load_error, self._failing_since = "", None

    def fail_load(self, reason: str, now: float, *, curable: bool = True) -> None:
        """A version could not be loaded. `curable`: a new replica may succeed, so this one dies (`load_patience_s`)."""
        self.load_error = reason
        if not curable:
            return
        if self._failing_since is None:
            self._failing_since = now
        if now - self._failing_since >= self.load_patience_s:
            self.die(reason)

    def observe(self, progress: int, now: float) -> None:
        """Note the engine's count of what it computed (`EngineStats.progress`): a new value proves that it works."""
        if progress != self._progress:
            self._progress = progress
            self.pass_probe(now)

    def probe_due(self, now: float) -> bool:
        """Whether the engine must generate a token to prove that it can: always while suspect, never while asleep."""
        silent = self.failed_probes > 0 or now - self.last_progress >= self.probe_after_s
        return silent and not (self.death or self.asleep)

    def pass_probe(self, now: float) -> None:
        """The engine has generated that token, or works on others."""
        self.failed_probes, self.last_progress = 0, now

    def fail_probe(self, reason: str) -> None:
        """The engine neither generated that token within the deadline nor did anything else."""
        self.failed_probes += 1
        if self.failed_probes >= self.max_failed_probes:
            self.die(f"{reason} ({self.failed_probes} times in a row)")

    def die(self, reason: str) -> None:
        """The replica is dead. Only the first reason is kept."""
        self.death = self.death or reason


# Counts of a replica. Requests only add to plain numbers; a task of the replica sends them to Ray's metrics every few
# seconds, so that no request waits for a metrics agent.

_MAX_OBSERVATIONS = 10_000  # of a histogram between two reports; the counters hold all
_BUCKETS = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300]
HISTOGRAMS = {
    "queue_seconds": "From a request's arrival to its first forward pass, of whole answers",
    "time_to_first_token_seconds": "From a streamed request's arrival to its first token",
    "request_seconds": "From a request's arrival to its answer",
}
GAUGES = {  # rates are 0 before anything was looked up
    "running_samples": "Samples that are being generated",
    "waiting_samples": "Samples that have not begun",
    "mean_batch": "Samples per decode step",
    "image_cache_hit_rate": "Images whose features were cached, since the start",
    "prefix_cache_hit_rate": "Prompt tokens found in the prefix cache, since the start",
    "adapter_swap_seconds": "From the adapter's arrival to its being served, the last time",
    "publish_seconds": "From publication to this replica's acknowledgement, the last time",
    "adapter_version": "Adapter version that the replica serves",
    "policy_version": "Newest version that answered, by policy",
}
COUNTERS = {
    "requests_total": "Requests answered",
    "prompt_tokens_total": "Prompt tokens, image tokens included",
    "generated_tokens_total": "Sampled tokens",
    "adapter_swaps_total": "Adapter versions loaded",
    "replica_starts_total": "Replicas started; more than one per place: they were replaced",
    "errors_total": "Requests that failed, by kind",
    "policy_requests_total": "Requests answered, by policy",
    "policy_prompt_tokens_total": "Prompt tokens, by policy",
    "policy_generated_tokens_total": "Sampled tokens, by policy",
}


@dataclass(slots=True)
class ReplicaTally:
    """Counts of one replica since it started."""

    # By counter, and by the policy or the kind (the error's class) that some are counted for.
    counts: Counter[tuple[str, str]] = field(default_factory=lambda: Counter({("replica_starts_total", ""): 1}))
    newest: Counter[str] = field(default_factory=Counter)  # version that has answered, by policy
    publish_s: float = 0.0
    observations: dict[str, deque[float]] = field(
        default_factory=lambda: {name: deque(maxlen=_MAX_OBSERVATIONS) for name in HISTOGRAMS}
    )

    def answered(self, policy: str, prompt_tokens: int, sampled: int, version: int, **seconds: float | None) -> None:
        """One request got its answer; `seconds` are observations of the histograms."""
        self.counts["requests_total", ""] += 1
        self.counts["policy_requests_total", policy] += 1
        self.counts["policy_prompt_tokens_total", policy] += prompt_tokens
        self.counts["policy_generated_tokens_total", policy] += sampled
        self.newest[policy] = max(self.newest[policy], version)
        for name, value in seconds.items():
            if value is not None:
                self.observations[name].append(value)

    def forget(self, policy: str) -> None:
        """Drop the counts of a policy that is gone."""
        del self.newest[policy]
        for name in [name for name in COUNTERS if name.startswith("policy_")]:
            del self.counts[name, policy]

    def report(self, stats: EngineStats, version: int, state: str) -> dict[str, Any]:
        """What readers of the registry see, as plain values."""
        errors = {kind: count for (name, kind), count in self.counts.items() if name == "errors_total"}
        return {
            "state": state,
            "version": version,
            "errors": errors,
            "publish_s": self.publish_s,
            "engine": asdict(stats),
        }


class RayMetrics:
    """Sends a replica's counts to `ray.util.metrics`, tagged with run, policy, part, application and replica."""

    def __init__(self, run: str, app: str, replica_id: str) -> None:
        tags = {"run": run, "policy": "policy", "part": "serving", "app": app, "replica": replica_id}

        def make(kind: Any, names: dict[str, str], *more: Any) -> dict[str, Any]:
            made = {}
            for name, text in names.items():
                keys = (*tags, "kind") if name == "errors_total" else (*tags,)
                made[name] = kind(f"rl_vlm_{name}", text, *more, tag_keys=keys)
                made[name].set_default_tags(tags)  # a policy's own metrics replace the tag `policy`
            return made

        self._counters, self._gauges = make(metrics.Counter, COUNTERS), make(metrics.Gauge, GAUGES)
        self._histograms = make(metrics.Histogram, HISTOGRAMS, _BUCKETS)
        self._sent: Counter[tuple[str, str]] = Counter()

    def send(self, tally: ReplicaTally, stats: EngineStats, version: int) -> None:
        """Report what has changed since the last call."""
        looked_up = stats.image_cache_hits + stats.image_cache_misses
        gauges = {
            "running_samples": stats.running,
            "waiting_samples": stats.waiting,
            "mean_batch": stats.mean_batch,
            "image_cache_hit_rate": stats.image_cache_hits / max(looked_up, 1),
            "prefix_cache_hit_rate": stats.prefix_cache_hits / max(stats.prefix_cache_queries, 1),
            "adapter_swap_seconds": stats.last_swap_s,
            "publish_seconds": tally.publish_s,
            "adapter_version": version,
        }
        for name, value in gauges.items():
            self._gauges[name].set(value)
        for policy, newest in tally.newest.items():
            self._gauges["policy_version"].set(newest, tags={"policy": policy})
        counts = tally.counts.copy()
        for name in ("prompt_tokens", "generated_tokens", "adapter_swaps"):
            counts[f"{name}_total", ""] = getattr(stats, name)
        for (name, of), total in counts.items():
            if (more := total - self._sent[name, of]) > 0:
                self._counters[name].inc(more, tags={"kind" if name == "errors_total" else "policy": of} if of else {})
        self._sent = counts
        for name, values in tally.observations.items():
            while values:
                self._histograms[name].observe(values.popleft())


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
    life: Lifecycle  # is told when the replica starts, sleeps, or fails to load a version
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
        """Sleep, or wake. The next call of `watch` tells the registry."""
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
        """Let requests come once what must be loaded before is loaded, and look again at those that wait."""
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
