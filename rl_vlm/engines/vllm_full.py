"""Full weights in a vLLM engine: one set for all requests, exchanged while none is sampled."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rl_vlm.engines.base import BASE_MODEL, EngineError, check_version
from rl_vlm.engines.vllm_adapters import claim_root, enough_room, release_root
from rl_vlm.models.full_weights import FullPayload
from rl_vlm.models.payload import WeightPayload
from rl_vlm.types import GenerationRequest, InFlightUpdates, UserInputError


class FullVersions:
    """The version of an AsyncLLM's weights, and its exchange. To be used on the event loop that the AsyncLLM was made on.

    A version waits until the requests that run are finished, and holds new ones back meanwhile. With in-flight updates running
    samples take it between two tokens. Its bytes go through a file in /dev/shm, where the engine core maps them.

    Args:
        llm: the AsyncLLM.
        in_flight: see `rollout.in_flight_updates`.
    """

    def __init__(self, llm: Any, in_flight: InFlightUpdates | None) -> None:
        self._llm, self._in_flight = llm, in_flight
        self._root, lock = claim_root()
        self._release = weakref.finalize(self, release_root, self._root, lock)  # also run when Python exits
        self.version = 0
        self.broken = ""  # why the weights may be those of no version; only a new engine helps
        self._hashes: dict[int, str] = {}
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()
        self._bound = 0  # requests that must end with the weights that they began with

    @asynccontextmanager
    async def lease(self, request: GenerationRequest) -> AsyncIterator[int]:
        """The version with which the request is sampled or, with in-flight updates, begins. Raises EngineError."""
        while not self._open.is_set():
            await self._open.wait()
        self._check(request)
        base = request.min_version == BASE_MODEL
        bound = base or self._in_flight is None
        if bound:
            self._bound += 1
            self._idle.clear()
        try:
            yield BASE_MODEL if base else self.version
        finally:
            if bound:
                self._bound -= 1
                if not self._bound:
                    self._idle.set()

    def _check(self, request: GenerationRequest) -> None:
        if self.broken:
            raise EngineError(self.broken)
        if request.min_version == BASE_MODEL and self.version:
            raise EngineError(
                f"Request {request.request_id}: these replicas of vLLM hold version {self.version} of all weights and no longer the "
                "base model: set serving.engine to transformers, which keeps both."
            )
        check_version(request, self.version)

    async def load(self, payload: WeightPayload) -> None:
        """Serve a version to every request that starts from now on. Raises EngineError."""
        file = await asyncio.to_thread(self._write, payload)
        self._open.clear()
        try:
            await self._idle.wait()
            # Not to be cut off by the caller's deadline: the weights would be half of this version.
            exchange = asyncio.ensure_future(self._exchange(payload, file))
            try:
                await asyncio.shield(exchange)
            except asyncio.CancelledError:
                await asyncio.wait({exchange})
                raise
        finally:
            file.unlink(missing_ok=True)
            self._open.set()

    async def _exchange(self, payload: WeightPayload, file: Path) -> None:
        llm = self._llm
        await llm.pause_generation(mode="keep", clear_cache=False)  # returns when the step under way is done
        try:
            await llm.collective_rpc("load_full_weights", args=(str(file),))
            await llm.update_weight_version(str(payload.version))  # which vLLM then names with every token
            # Keys, values and image features of the older weights. The processor's cache holds pixels, and stays.
            if not await llm.reset_prefix_cache(reset_running_requests=self._in_flight is not None):
                raise EngineError("vLLM kept keys and values of the older weights")
            await llm.reset_encoder_cache()
        except BaseException as error:
            # Generation stays paused: nothing may be sampled from weights that are half of one version.
            self.broken = f"Version {payload.version} was not loaded as a whole ({error!r}): restart the replica."
            raise EngineError(self.broken) from error
        self.version = payload.version
        self._hashes[payload.version] = payload.sha256
        await llm.resume_generation()

    def _write(self, payload: WeightPayload) -> Path:
        if not isinstance(payload, FullPayload):
            raise UserInputError(
                f"Version {payload.version} is an adapter, and these replicas serve full weights: set model.train to lora."
            )
        payload.verify()
        if self._hashes.get(payload.version, payload.sha256) != payload.sha256:
            raise EngineError(
                f"Weight version {payload.version} was loaded with other weights: publish these under a new version."
            )
        file = self._root / f"v{payload.version}.safetensors"
        try:
            with enough_room(self._root):
                file.write_bytes(payload.tensors)
        except BaseException:
            file.unlink(missing_ok=True)  # a part of it would keep the memory that the next attempt needs
            raise
        return file

    def close(self) -> None:
        """Delete what lies in /dev/shm."""
        self._release()
