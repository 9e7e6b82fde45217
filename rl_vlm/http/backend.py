"""The Serve application as the backend of the HTTP side: names, retries, streams over the deployment handle."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException

from rl_vlm.engines.base import BASE_MODEL
from rl_vlm.safe_text import one_line
from rl_vlm.serving.client import GenerationFailedError, PolicyClient
from rl_vlm.serving.health import ReplicaState
from rl_vlm.serving.replica import ReplicaUnavailableError
from rl_vlm.types import POLICY, GenerationRequest, RLVLMError, SampleChunk
from rl_vlm.waiting import JITTER

logger = logging.getLogger("rl_vlm.http")

_REFRESH_S = 0.5  # how old the registry's status may be
_ANSWER_S = 5.0  # how long the registry may take


class ServedModel(NamedTuple):
    """What a model's name stands for."""

    policy: str
    version: int
    parent: str | None = None  # the name of the model that the adapter changes
    exact: bool = False  # this version and no newer one
    folder: str = ""  # from which a client has loaded it


class ServeBackend(PolicyClient):
    """Answers through a run's Serve application. Its errors are RLVLMErrors.

    Args:
        adapters: a `ServedAdapters`, or what has its methods.
        name: the name of the model without an adapter. `policy` and `policy-vN` are its adapter, once there is one.
        deadline_s: of one request, retries included.
        keeps_base: whether replicas with a version still answer for the model without one.
    """

    def __init__(
        self, handle: Any, adapters: Any, name: str, *, run_id: str, deadline_s: float, keeps_base: bool = True
    ) -> None:
        # Answers are long and clients do not wait for each other: one call per request.
        super().__init__(run_id, deadline_s=deadline_s, homes=(), coalesce=False, handle=handle)
        self._adapters, self._name, self._keeps_base = adapters, name, keeps_base
        self._known: dict[str, Any] | None = None  # the registry's last status
        self._good_until = float("-inf")
        self._asking = asyncio.Lock()

    async def models(self) -> dict[str, ServedModel]:
        """The names that clients may ask for, of what replicas have. The first is for clients that name none."""
        policies = (await self._status())["policies"].items()
        every = [ServedModel(name, one["version"], self._name, folder=one["folder"]) for name, one in policies]
        named = {one.policy: one for one in every if one.version}
        exact = {f"{name}-v{one.version}": one._replace(exact=True) for name, one in named.items()}
        first = {name: one for name, one in (named | exact).items() if one.policy == POLICY}
        base = {self._name: ServedModel(POLICY, BASE_MODEL)} if self._keeps_base or not first else {}
        # Later ones win: a client may call an adapter policy-a-v1, and the model is called as its owner wants.
        return first | base | exact | named | base

    async def change(self, name: str, path: str | None) -> None:
        """Load the adapter in a folder, or forget it: see `ServedAdapters`."""
        try:
            await (self._adapters.unload(name) if path is None else self._adapters.load(name, path))
        except RayTaskError as error:  # where a deployment does it
            raise error.cause from error
        finally:
            self._good_until = float("-inf")

    async def _status(self) -> dict[str, Any]:
        """The registry's status, half a second old; the last one while it is being restarted. Raises
        GenerationFailedError before it has answered once: the base model would answer in place of the adapter."""
        async with self._asking:  # one question, however many wait for its answer
            if time.monotonic() > self._good_until:
                try:
                    async with asyncio.timeout(_ANSWER_S):
                        self._known = await self._adapters.status()
                except (RayError, RayServeException, TimeoutError) as error:
                    logger.warning("The adapter registry does not answer: %s", error)
                self._good_until = time.monotonic() + _REFRESH_S
        if self._known is None:
            raise GenerationFailedError("The adapter registry does not answer: try again in a moment.")
        return self._known

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[SampleChunk, None]:
        """Answer one request piece by piece; retried elsewhere before the first piece. Closing it frees its place."""
        deadline = time.monotonic() + self.deadline_s
        for attempt in itertools.count(1):
            response = self.handle.options(stream=True).stream.remote(request)
            started = False
            try:
                async for chunk in response:
                    started = True
                    yield chunk
                return
            except (RayError, RayServeException, RLVLMError) as error:
                cause = error.cause if isinstance(error, RayTaskError) else error
                rejected = isinstance(error, RayTaskError) and not isinstance(cause, ReplicaUnavailableError)
                pause = JITTER.uniform(0, min(2.0, 0.05 * 2**attempt))
                if started or rejected or time.monotonic() + pause >= deadline:
                    what = "The replica rejected" if rejected else "The replica died while it answered"
                    raise GenerationFailedError(f"{what} the request: {one_line(cause or error)}") from error
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
