"""The client of the served policy: batches requests, spreads them over replicas, retries when a replica dies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

from ray import serve
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, RayServeException

from rl_vlm import tracing
from rl_vlm.engines.base import BASE_MODEL
from rl_vlm.serving.registry import OWN, PolicyKey, app_name
from rl_vlm.serving.replica import ReplicaUnavailableError
from rl_vlm.serving.router import home_session
from rl_vlm.types import Completion, EncodedImage, GenerationRequest, RLVLMError
from rl_vlm.waiting import JITTER

logger = logging.getLogger(__name__)

_ENCODE_TIMEOUT_S = 5.0  # of the call that names the images that come next
_RETRYABLE = (ActorDiedError, ActorUnavailableError, RayActorError, BackPressureError, RayServeException)


class GenerationFailedError(RLVLMError):
    """A request got no answer within its deadline, or the engine rejected it.

    Do: read the replicas' logs, or raise `serving.request_timeout_s`.
    """


@dataclass(eq=False)
class PolicyClient:
    """Sends generation requests to a run's Serve application, from inside an event loop."""

    run_id: str  # of the run's application, or of the one that it shares
    _: KW_ONLY
    deadline_s: float  # how long one request may take, retries included
    # Places (in the order of ids) of the replicas for new work: requests of one moment are spread over them, one call
    # each. With one home of its own, an env runner's requests form one batch on one replica.
    homes: Sequence[int]
    # Send requests of the same moment in common calls. A call ends when its slowest request does, so this helps when
    # answers are short (a Serve call costs milliseconds) and hurts when they are long.
    coalesce: bool = True
    handle: Any = None  # the deployment handle; looked up when None
    key: PolicyKey = OWN  # the policy that is asked
    sleep: Callable[[float], Any] = asyncio.sleep
    retries: int = 0  # calls that were sent again

    def __post_init__(self) -> None:
        self.handle = self.handle or serve.get_deployment_handle("policy", app_name(self.run_id))
        self._queue: list[tuple[GenerationRequest, asyncio.Future[Completion]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def generate(self, request: GenerationRequest) -> Completion:
        """Answer one request, whatever policy it names, as the client's own. Raises GenerationFailedError."""
        if request.policy != self.key.policy:
            request = replace(request, policy=self.key.policy)
        if not tracing.traceparent():
            return await self._generate(request)
        with tracing.span("request", request=request.request_id, samples=request.sampling.n):
            completion = await self._generate(replace(request, trace=tracing.traceparent()))
            tracing.adopt(completion.spans)
            return completion

    async def _generate(self, request: GenerationRequest) -> Completion:
        if not self.coalesce:
            return (await self.call([request], request.preferred_replica))[0]
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        if not self._queue:
            # Everything that is submitted before the loop is idle again goes into the same calls.
            loop.call_soon(loop.call_soon, self._flush)
        self._queue.append((request, future))
        return await future

    async def encode_images(self, images: Sequence[Sequence[EncodedImage]]) -> None:
        """Announce to replicas the images of the next requests, one entry per request, in order. A hint: failures are
        ignored, and without coalescing, when replicas are not known yet, nothing is done."""
        if not self.coalesce:
            return
        targets = tuple(map(home_session, self.homes[: len(images)]))
        for part, target in enumerate(targets):
            shown = [image for entry in images[part :: len(targets)] for image in entry]
            response = None
            try:
                response = self.handle.options(session_id=target).encode_images.remote(shown)
                async with asyncio.timeout(_ENCODE_TIMEOUT_S):
                    await response
            except (*_RETRYABLE, RayTaskError, TaskCancelledError, RLVLMError, TimeoutError) as error:
                if response is not None:
                    response.cancel()  # it may still wait for a replica
                logger.debug("images were not encoded ahead: %s", error)

    def _flush(self) -> None:
        queue, self._queue = self._queue, []
        calls: dict[tuple[str, bool], list[tuple[GenerationRequest, asyncio.Future[Completion]]]] = {}
        for entry in queue:
            # An engine that merges adapters runs base model and policy one after the other.
            calls.setdefault((entry[0].preferred_replica, entry[0].min_version == BASE_MODEL), []).append(entry)
        for (replica, _), entries in calls.items():
            targets = (replica,) if replica else tuple(map(home_session, self.homes[: len(entries)]))
            for part, target in enumerate(targets):
                self._spawn(entries[part :: len(targets)], target)

    def _spawn(self, entries: list[tuple[GenerationRequest, asyncio.Future[Completion]]], session_id: str) -> None:
        futures = [future for _, future in entries]

        async def run() -> None:
            try:
                completions = await self.call([request for request, _ in entries], session_id)
                for future, completion in zip(futures, completions, strict=True):
                    if not future.done():
                        future.set_result(completion)
            except Exception as error:  # whatever it is, no future may stay unresolved
                for future in futures:
                    if not future.done():
                        future.set_exception(error)

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

        def stop_if_unwanted(_: object) -> None:
            if all(future.cancelled() for future in futures):
                task.cancel()

        for future in futures:
            future.add_done_callback(stop_if_unwanted)

    async def call(self, requests: list[GenerationRequest], session_id: str = "") -> list[Completion]:
        """Answer several requests on one replica, first on that of `session_id`; with backoff until the deadline."""
        started = time.monotonic()
        attempt = 0
        while True:
            left = self.deadline_s - (time.monotonic() - started)
            try:
                target = session_id if attempt == 0 else ""
                response = self.handle.options(session_id=target).generate.remote(requests)
                async with asyncio.timeout(max(left, 0.001)):
                    return await response  # type: ignore[no-any-return]
            except TimeoutError as error:
                response.cancel()
                raise GenerationFailedError(
                    f"No answer within {self.deadline_s:g} s for {len(requests)} requests: the replicas are "
                    "overloaded or stuck; raise serving.request_timeout_s or add replicas."
                ) from error
            except asyncio.CancelledError:
                response.cancel()
                raise
            except _RETRYABLE as error:
                reason: Exception = error
            except (RayTaskError, TaskCancelledError, RLVLMError) as error:
                cause = error.cause if isinstance(error, RayTaskError) else error
                if not isinstance(cause, (ReplicaUnavailableError, TaskCancelledError)):
                    raise GenerationFailedError(f"The engine rejected {len(requests)} requests: {cause}") from error
                reason = error
            attempt += 1
            self.retries += 1
            # Full jitter keeps the clients of a dead replica from coming back together.
            pause = JITTER.uniform(0, min(2.0, 0.05 * 2**attempt))
            if time.monotonic() - started + pause >= self.deadline_s:
                raise GenerationFailedError(
                    f"No answer within {self.deadline_s:g} s after {attempt} attempts; the last error: {reason}"
                ) from reason
            await self.sleep(pause)
