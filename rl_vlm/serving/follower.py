"""Keeps one engine at the registry's newest adapter, and retries after any failure."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from rl_vlm.coroutines import repeat
from rl_vlm.engines.base import Engine
from rl_vlm.serving.lifecycle import Lifecycle
from rl_vlm.serving.metrics import ReplicaTally
from rl_vlm.serving.registry import POLL_S
from rl_vlm.serving.version_line import Published
from rl_vlm.types import UserInputError

logger = logging.getLogger("ray.serve")

REGISTRY_ANSWER_S = 10.0  # how long the registry may take for an immediate answer
_ABANDONED_S = 60.0  # a registry that restarts is there again sooner


class RegistryLookup:
    """Finds the registry of a name, and tells when there has been none for a minute: then nobody will stop its replicas.

    Args:
        find: returns the registry's actor handle; raises ValueError when there is none of its name.
        abandoned: called when there has been none for a minute.
    """

    def __init__(self, find: Callable[[], Any], abandoned: Callable[[], None]) -> None:
        self._find, self._abandoned = find, abandoned
        self._missing_since: float | None = None

    def __call__(self) -> Any:
        """The registry's handle. Raises ValueError."""
        try:
            found = self._find()
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


class AdapterFollower:
    """Loads the newest adapter, then keeps a call to the registry open and loads each version that comes.

    Args:
        replica_id: by which the registry knows this replica.
        engine: what adapters are loaded into.
        life: gets each version that is announced, loaded, or fails to load.
        tally: its report goes to the registry; the seconds of the last publication come back into it.
        find_registry: returns the registry's actor handle; raises ValueError when there is none of its name.
        abandoned: called when there has been none for a minute: the run has ended without stopping its replicas.
        load_timeout_s: how long fetching and loading one version may take.
        notify: called after each change of `life`.
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
    ) -> None:
        self._replica_id = replica_id
        self._engine, self._life, self._tally = engine, life, tally
        self._find_registry = RegistryLookup(find_registry, abandoned)
        self._load_timeout_s = load_timeout_s
        self._notify = notify

    async def run(self) -> None:
        """Follow until cancelled. No failure ends it: `life` says how long failures may go on."""
        # A registry that restarts, a full disk, a GPU without memory: each may be over at the next attempt.
        await repeat(self._catch_up, logger, f"replica {self._replica_id} cannot follow the registry")

    async def _catch_up(self) -> None:
        registry = self._find_registry()
        answer = await self._ask(registry)
        if isinstance(answer, bool):
            await self._rest(answer)
            return
        if answer is not None:
            await self._load(answer)
        if not self._life.started:
            self._life.start()
            await self._notify()
        if answer is not None:
            async with asyncio.timeout(REGISTRY_ANSWER_S):
                seconds = await registry.ack.remote(self._replica_id, answer.version, answer.sha256)
            self._tally.publish_s = seconds or self._tally.publish_s

    async def _ask(self, registry: Any) -> Published | bool | None:
        # Each wait has a deadline: an object of a dead owner may never arrive, and no error be raised.
        if not self._life.started:
            async with asyncio.timeout(REGISTRY_ANSWER_S):
                return await registry.newest.remote()  # type: ignore[no-any-return]
        report = self._tally.report(self._engine.stats(), self._engine.version, self._life.state)
        async with asyncio.timeout(POLL_S + REGISTRY_ANSWER_S):
            return await registry.wait_newer.remote(  # type: ignore[no-any-return]
                self._replica_id, self._engine.version, report, self._life.resting
            )

    async def _rest(self, rest: bool) -> None:
        """Rest, or wake. The registry hears of it with the next question."""
        self._life.resting = True  # from now on requests wait, so that the running ones come to an end
        resting = not rest
        try:
            async with asyncio.timeout(self._load_timeout_s):
                await (self._engine.rest() if rest else self._engine.wake())
            resting = rest
        finally:
            self._life.resting = resting
            await self._notify()

    async def _load(self, published: Published) -> None:
        self._life.announce(published.version)
        try:
            async with asyncio.timeout(self._load_timeout_s):
                payload = await published.ref
                if self._life.resting:
                    await self._engine.wake()
                    self._life.resting = False
                if payload.version > self._engine.version:
                    await self._engine.load_adapter(payload)
        except Exception as error:
            # A wrong version fails in a new replica as well; other failures may not.
            reason = f"Version {published.version} could not be loaded: {error!r}"
            self._life.fail_load(reason, time.monotonic(), curable=not isinstance(error, UserInputError))
            await self._notify()
            raise
        self._life.load(self._engine.version)
        await self._notify()
