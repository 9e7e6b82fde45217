"""The Serve application as the backend of the HTTP side: names, retries, streams over the deployment handle."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from rl_vlm.engines.base import BASE_MODEL
from rl_vlm.serving.client import GenerationFailedError, PolicyClient
from rl_vlm.serving.follower import ReplicaState
from rl_vlm.serving.replica import ReplicaUnavailableError
from rl_vlm.types import Completion, GenerationRequest, RLVLMError, SampleChunk
from rl_vlm.waiting import JITTER

logger = logging.getLogger("rl_vlm.http")

_REFRESH_S = 0.5  # how old the registry's status may be
_ANSWER_S = 5.0  # how long the registry may take


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A name that clients may ask for and the policy version behind it (`BASE_MODEL`: no adapter)."""

    name: str
    version: int = BASE_MODEL


class ServeBackend:
    """Answers through a run's Serve application. Its errors are RLVLMErrors.

    Args:
        handle: the deployment handle.
        registry: a handle whose `status.remote()` asks the adapter registry: its actor's, or a deployment's.
        name: the name of the model without an adapter. `policy` and `policy-vN` are its adapter, once there is one.
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
        self._good_until = float("-inf")
        self._asking = asyncio.Lock()

    async def models(self) -> Sequence[ServedModel]:
        """The models that are served; the first is for clients that name none.

        The newest version, if there is one, and the model without one where replicas have that, too.
        """
        base = ServedModel(self._name, BASE_MODEL)
        version = (await self._status())["version"]
        if not version:
            return [base]
        policy = [ServedModel("policy", version), ServedModel(f"policy-v{version}", version)]
        return [*policy, base] if self._keeps_base else policy

    async def _status(self) -> dict[str, Any]:
        """The registry's status: half a second old, or the last one while the registry is being restarted.

        Raises GenerationFailedError before it has answered once: the base model would answer in place of the adapter.
        """
        async with self._asking:  # one question, however many wait for its answer
            if time.monotonic() > self._good_until:
                await self._ask_registry()
                self._good_until = time.monotonic() + _REFRESH_S
        if self._known is None:
            raise GenerationFailedError("The adapter registry does not answer: try again in a moment.")
        return self._known

    async def _ask_registry(self) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                status = await self._registry.status.remote()
        except (RayError, RayServeException, TimeoutError) as error:
            logger.warning("The adapter registry does not answer: %s", error)
            return
        # A registry that has just been restarted may not have its version again yet: versions only grow.
        if self._known is None or status["version"] >= self._known["version"]:
            self._known = status

    async def generate(self, request: GenerationRequest) -> Completion:
        """Answer one request; a dead replica's are tried again on another. Cancelling the call frees its place."""
        return await self._client.generate(request)

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[SampleChunk, None]:
        """Answer one request piece by piece; retried on another replica only before the first piece has arrived.

        Closing the generator frees its place.
        """
        deadline = time.monotonic() + self._deadline_s
        for attempt in itertools.count(1):
            response = self._handle.options(stream=True).stream.remote(request)
            started = False
            try:
                async for chunk in response:
                    started = True
                    yield chunk
                return
            except (RayError, RayServeException, RLVLMError) as error:
                cause = error.cause if isinstance(error, RayTaskError) else error
                refused = isinstance(error, RayTaskError) and not isinstance(cause, ReplicaUnavailableError)
                pause = JITTER.uniform(0, min(2.0, 0.05 * 2**attempt))
                if started or refused or time.monotonic() + pause >= deadline:
                    what = "The replica refused" if refused else "The replica died while it answered"
                    raise GenerationFailedError(f"{what} the request: {_sentence(cause)}") from error
            except BaseException:  # the client is gone
                response.cancel()
                raise
            await asyncio.sleep(pause)

    async def health(self) -> None:
        """Raise GenerationFailedError when there is no replica, or all have engines that do not answer."""
        status = await self._status()
        if not status["replicas"]:
            raise GenerationFailedError("No replica answers: they may be starting.")
        states = {report["state"] for report in status["reports"].values()}
        if states and states <= {ReplicaState.SUSPECT, ReplicaState.DEAD}:
            raise GenerationFailedError("Every replica's engine is silent: they are being replaced.")

    async def metrics(self) -> str:
        """Each replica's last report (sent every few seconds), in Prometheus' text format."""
        lines = []
        for replica, report in (await self._status())["reports"].items():
            of, numbers = f'replica="{replica}"', {f"engine_{name}": value for name, value in report["engine"].items()}
            numbers |= {"adapter_version": report["version"], "publish_seconds": report["publish_s"]}
            lines.append(f'state{{{of},state="{report["state"]}"}} 1')
            lines += [f"{name}{{{of}}} {float(value)}" for name, value in numbers.items()]
            lines += [f'errors{{{of},kind="{kind}"}} {count}' for kind, count in report["errors"].items()]
        return "".join(f"rl_vlm_replica_{line}\n" for line in lines)


def _sentence(error: BaseException | None) -> str:
    """The first line of an error: Ray appends the traceback of another process."""
    return next(iter(str(error or "").strip().splitlines()), "")
