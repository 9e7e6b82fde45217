"""The Serve application as the backend of the HTTP side: names, retries, streams over the deployment handle."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from rl_vlm.engines.base import BASE_MODEL
from rl_vlm.http.app import ServedModel
from rl_vlm.serving.client import GenerationFailedError, PolicyClient
from rl_vlm.serving.server import ReplicaUnavailableError
from rl_vlm.types import Completion, GenerationRequest, RLVLMError, SampleChunk

logger = logging.getLogger("rl_vlm.http")

_REFRESH_S = 0.5  # how old the known adapter version may be
_PROBE_S = 5.0


class ServeBackend:
    """Answers through a run's Serve application.

    Args:
        handle: the deployment handle.
        registry: the adapter registry's actor handle.
        name: what clients call the model without an adapter. `policy` is its newest adapter, once there is one, and
            `policy-vN` that version alone.
        run_id, num_replicas: of the application.
        deadline_s: of one request, retries included.
    """

    def __init__(
        self, handle: Any, registry: Any, name: str, *, run_id: str, num_replicas: int, deadline_s: float
    ) -> None:
        self._handle = handle
        self._registry = registry
        self._name = name
        self._deadline_s = deadline_s
        # Answers are long and clients do not wait for each other: one call per request.
        self._client = PolicyClient(
            run_id, deadline_s=deadline_s, num_replicas=num_replicas, coalesce=False, handle=handle
        )
        self._version = 0
        self._asked = -_REFRESH_S

    async def models(self) -> Sequence[ServedModel]:
        """The newest adapter, if there is one, and the model without an adapter."""
        base = ServedModel(self._name, BASE_MODEL)
        version = await self._newest()
        if not version:
            return [base]
        return [ServedModel("policy", version), ServedModel(f"policy-v{version}", version, pinned=True), base]

    async def _newest(self) -> int:
        if time.monotonic() - self._asked >= _REFRESH_S:
            self._asked = time.monotonic()
            try:
                async with asyncio.timeout(_PROBE_S):
                    self._version = int((await self._registry.status.remote())["version"])
            except (RayError, TimeoutError) as error:
                logger.warning("The adapter registry does not answer: %s", error)  # it restarts; versions only grow
        return self._version

    async def generate(self, request: GenerationRequest) -> Completion:
        """Answer one request; a dead replica's are tried again on another."""
        return await self._client.generate(request)

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[SampleChunk, None]:
        """Answer one request piece by piece. Tried again only as long as nothing has arrived."""
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
                pause = random.uniform(0, min(2.0, 0.05 * 2**attempt))
                if started or refused or time.monotonic() + pause >= deadline:
                    what = "The replica refused" if refused else "The replica died while it answered"
                    raise GenerationFailedError(f"{what} the request: {_sentence(cause)}") from error
            finally:
                if not finished:
                    response.cancel()
            await asyncio.sleep(pause)

    async def health(self) -> None:
        """Raise GenerationFailedError when no replica answers."""
        try:
            async with asyncio.timeout(_PROBE_S):
                await self._handle.status.remote()
        except (RayError, RayServeException, TimeoutError) as error:
            raise GenerationFailedError(f"No replica answers: {_sentence(error) or 'they may be starting'}") from error

    def metrics(self) -> str:
        """Requests by replica, and retries."""
        stats = self._client.stats
        lines = ["# TYPE rl_vlm_replica_requests_total counter"]
        lines += [
            f'rl_vlm_replica_requests_total{{replica="{name}"}} {n}' for name, n in stats.requests_by_replica.items()
        ]
        lines += ["# TYPE rl_vlm_client_retries_total counter", f"rl_vlm_client_retries_total {stats.retries}"]
        return "\n".join(lines) + "\n"


def _sentence(error: BaseException | None) -> str:
    """The first line of an error: Ray's go on with the traceback of another process."""
    return next(iter(str(error or "").strip().splitlines()), "")
