"""The Serve application as the backend of the HTTP side: names, retries, streams over the deployment handle."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from rl_vlm.engines.base import BASE_MODEL
from rl_vlm.http.service import ServedModel
from rl_vlm.serving.client import GenerationFailedError, PolicyClient
from rl_vlm.serving.follower import ReplicaState
from rl_vlm.serving.replica import ReplicaUnavailableError
from rl_vlm.types import Completion, GenerationRequest, RLVLMError, SampleChunk
from rl_vlm.waiting import JITTER

logger = logging.getLogger("rl_vlm.http")

_REFRESH_S = 0.5  # how old the cached status of the registry may be
_PROBE_S = 5.0


class ServeBackend:
    """Answers through a run's Serve application.

    Args:
        handle: the deployment handle.
        registry: a handle whose `status.remote()` asks the adapter registry: its actor's, or a deployment's.
        name: the name of the model without an adapter. `policy` is its newest adapter, once there is one, and
            `policy-vN` that version alone.
        run_id: of the application.
        deadline_s: of one request, retries included.
        keeps_base: whether replicas with a version still answer for the model without one.
    """

    def __init__(
        self, handle: Any, registry: Any, name: str, *, run_id: str, deadline_s: float, keeps_base: bool = True
    ) -> None:
        self._handle = handle
        self._registry = registry
        self._name, self._keeps_base = name, keeps_base
        self._deadline_s = deadline_s
        # Answers are long and clients do not wait for each other: one call per request.
        self._client = PolicyClient(run_id, deadline_s=deadline_s, homes=(), coalesce=False, handle=handle)
        self._known: dict[str, Any] | None = None  # the registry's last status
        self._asked = -_REFRESH_S
        self._first: asyncio.Task[None] | None = None  # asks for the first status

    async def models(self) -> Sequence[ServedModel]:
        """The newest version, if there is one, and the model without one where replicas have that, too."""
        base = ServedModel(self._name, BASE_MODEL)
        version = (await self._status())["version"]
        if not version:
            return [base]
        policy = [ServedModel("policy", version), ServedModel(f"policy-v{version}", version, pinned=True)]
        return [*policy, base] if self._keeps_base else policy

    async def _status(self) -> dict[str, Any]:
        """The registry's status, at most half a second old unless the registry is being restarted.

        Raises GenerationFailedError before it has answered once: the base model would answer in place of the adapter.
        """
        if self._known is None:
            if self._first is None or self._first.done():
                self._first = asyncio.create_task(self._ask())
            await asyncio.shield(self._first)  # a client that goes away does not cancel it for the others
        elif time.monotonic() - self._asked >= _REFRESH_S:
            await self._ask()
        if self._known is None:
            raise GenerationFailedError("The adapter registry does not answer: try again in a moment.")
        return self._known

    async def _ask(self) -> None:
        self._asked = time.monotonic()
        try:
            async with asyncio.timeout(_PROBE_S):
                status = await self._registry.status.remote()
            # A registry that has just been restarted may not have its version again yet: versions only grow.
            if self._known is None or status["version"] >= self._known["version"]:
                self._known = status
        except (RayError, RayServeException, TimeoutError) as error:
            logger.warning("The adapter registry does not answer: %s", error)

    async def generate(self, request: GenerationRequest) -> Completion:
        """Answer one request; a dead replica's are tried again on another."""
        return await self._client.generate(request)

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[SampleChunk, None]:
        """Answer one request piece by piece; retried on another replica only before the first piece has arrived."""
        deadline = time.monotonic() + self._deadline_s
        attempt = 0
        while True:
            response = self._handle.options(stream=True).stream.remote(request)
            started = finished = False
            try:
                async for chunk in response:
                    started = True
                    yield chunk
                finished = True
                return
            except (RayError, RayServeException, RLVLMError) as error:
                finished = True
                cause = error.cause if isinstance(error, RayTaskError) else error
                refused = isinstance(error, RayTaskError) and not isinstance(cause, ReplicaUnavailableError)
                attempt += 1
                pause = JITTER.uniform(0, min(2.0, 0.05 * 2**attempt))
                if started or refused or time.monotonic() + pause >= deadline:
                    what = "The replica refused" if refused else "The replica died while it answered"
                    raise GenerationFailedError(f"{what} the request: {_sentence(cause)}") from error
            finally:
                if not finished:
                    response.cancel()
            self._client.retries += 1
            await asyncio.sleep(pause)

    async def health(self) -> None:
        """Raise GenerationFailedError when no replica answers, or all have engines that do not."""
        response = None
        try:
            response = self._handle.status.remote()
            async with asyncio.timeout(_PROBE_S):
                await response
        except (RayError, RayServeException, TimeoutError) as error:
            if response is not None:
                response.cancel()  # or one more call with each probe would wait for a replica
            raise GenerationFailedError(f"No replica answers: {_sentence(error) or 'they may be starting'}.") from error
        states = {report["state"] for report in (await self._status())["reports"].values()}
        if states and states <= {ReplicaState.SUSPECT, ReplicaState.DEAD}:
            raise GenerationFailedError("Every replica's engine is silent: they are being replaced.")

    async def metrics(self) -> str:
        """Each replica's last report (sent every few seconds), and this server's retries."""
        registry = CollectorRegistry()
        retries = Counter("rl_vlm_client_retries", "Calls that went to another replica.", registry=registry)
        retries.inc(self._client.retries)
        gauges: dict[str, Gauge] = {}

        def put(name: str, value: float, **labels: str) -> None:
            if name not in gauges:
                meaning = "Of a replica, since it started."
                gauges[name] = Gauge(f"rl_vlm_replica_{name}", meaning, list(labels), registry=registry)
            gauges[name].labels(**labels).set(value)

        for replica, report in (await self._status())["reports"].items():
            put("state", 1, replica=replica, state=report["state"])
            put("adapter_version", report["version"], replica=replica)
            put("answered", report["requests"], replica=replica)
            put("publish_seconds", report["publish_s"], replica=replica)
            for kind, count in report["errors"].items():
                put("errors", count, replica=replica, kind=kind)
            for name, value in report["engine"].items():
                put(f"engine_{name}", value, replica=replica)
        return generate_latest(registry).decode()


def _sentence(error: BaseException | None) -> str:
    """The first line of an error: Ray appends the traceback of another process."""
    return next(iter(str(error or "").strip().splitlines()), "")
