"""The weights of a vLLM engine: the adapter versions that requests use, or one set of all weights."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import weakref
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rl_vlm.engines.base import BASE_MODEL, EngineError, check_version
from rl_vlm.engines.vllm_setup import DEAD
from rl_vlm.models.shared_memory import OwnFolder
from rl_vlm.models.weights import WeightPayload, in_language_model, require_full
from rl_vlm.types import POLICY, GenerationRequest, InFlightUpdates

_KEPT = 2  # the newest adapters of a policy stay although no request uses them


@dataclass(eq=False)
class Adapter:
    """One loaded version of a policy, whose folder is deleted by `delete` or with the last reference."""

    version: int
    request: Any  # vLLM's LoRARequest

    def __post_init__(self) -> None:
        self.delete = weakref.finalize(self, shutil.rmtree, self.request.lora_path, ignore_errors=True)


class Lease(NamedTuple):
    """What a request is sampled, or begins, with; held until it is finished."""

    version: int
    adapter: Adapter | None = None
    named: bool = False  # vLLM names the version of each token, because it may change


class Versions:
    """What both kinds of versions have in common: a folder, in /dev/shm where there is room, through which vLLM reads
    them. To be used on the event loop of the AsyncLLM `llm`; `in_flight`: see `rollout.in_flight_updates`."""

    broken = ""  # why the weights may be those of no version; only a new engine helps

    def __init__(self, llm: Any, in_flight: InFlightUpdates | None) -> None:
        self._llm, self._in_flight = llm, in_flight
        self._folder = OwnFolder()
        self.root, self.close = self._folder.path, self._folder.close


class AdapterVersions(Versions):
    """LoRA adapters, several versions of several policies at a time.

    Every version gets a new id, name and folder: vLLM keeps the weights of an id that it knows, and its prefix cache
    knows versions by names and folders. vLLM may read a folder again while a request with its adapter is running.

    With in-flight updates all versions have one id and one name: a version takes its predecessor's place under the
    running requests, between two of vLLM's steps.
    """

    def __init__(self, llm: Any, in_flight: InFlightUpdates | None) -> None:
        super().__init__(llm, in_flight)
        self._adapters: defaultdict[str, deque[Adapter]] = defaultdict(lambda: deque(maxlen=_KEPT))  # by policy
        self._next_id = 1
        self._fitting: tuple[str, ...] = ()  # names of tensors of which the model has all modules

    @property
    def version(self) -> int:
        return max((adapters[-1].version for adapters in list(self._adapters.values())), default=0)

    @contextlib.asynccontextmanager
    async def lease(self, request: GenerationRequest) -> AsyncIterator[Lease]:
        """The newest version of the request's policy. Raises EngineError."""
        if request.min_version == BASE_MODEL:
            yield Lease(BASE_MODEL)
            return
        adapters = self._adapters.get(request.policy)
        check_version(request, adapters[-1].version if adapters else 0)
        yield Lease(adapters[-1].version, adapters[-1], self._in_flight is not None) if adapters else Lease(0)

    async def load(self, payload: WeightPayload) -> None:
        """See Engine.load_adapter. Raises EngineError."""
        adapter = await asyncio.to_thread(self._write, payload)
        try:
            if self._in_flight is None:
                await self._llm.add_lora(adapter.request)
            else:
                await self._replace(adapter)
            await self._check_used(adapter, tuple(payload.state()))
        except Exception as error:  # vLLM raises errors of the engine core as plain Exceptions
            adapter.delete()
            reason = DEAD if self._llm.errored else f"vLLM rejected adapter version {payload.version}: {error}"
            raise EngineError(reason) from error
        self._adapters[payload.policy].append(adapter)

    async def _check_used(self, adapter: Adapter, names: tuple[str, ...]) -> None:
        if names == self._fitting:
            return
        number = adapter.request.lora_int_id
        unused = [name for found in await self._llm.collective_rpc("unused_modules", args=(number,)) for name in found]
        if unused:
            await self._llm.remove_lora(number)
            raise EngineError(f"its model has no module {unused[0]}, and {len(unused)} names have no effect")
        self._fitting = names

    async def _replace(self, adapter: Adapter) -> None:
        from vllm.lora.request import LoRARequest

        name, number, path = adapter.request.lora_name, adapter.request.lora_int_id, adapter.request.lora_path
        await self._llm.pause_generation(mode="keep", clear_cache=False)  # returns when the steps under way are done
        try:
            await self._llm.add_lora(LoRARequest(name, number, path, load_inplace=True))
            await self._llm.update_weight_version(str(adapter.version))  # which vLLM then names with every token
            if self._in_flight == "recompute":
                await self._llm.reset_prefix_cache(reset_running_requests=True)  # they are prefilled anew
        finally:
            await self._llm.resume_generation()

    def _write(self, payload: WeightPayload) -> Adapter:
        from vllm.lora.request import LoRARequest

        unsupported = [name for name in payload.verify().state() if not in_language_model(name)]
        if unsupported:
            # vLLM would silently ignore an adapted vision tower.
            raise EngineError(
                f"Adapter version {payload.version} adapts {unsupported[0]}: only the language model's linear layers "
                "may be."
            )
        number, self._next_id = self._next_id, self._next_id + 1
        # With the number: a policy may be dropped, and its name and versions come again with other weights.
        name = f"{payload.policy}-v{payload.version}-{number}"
        with enough_room(self.root):
            folder = payload.write(self.root / str(number))
        name, slot = (name, number) if self._in_flight is None else (POLICY, 1)
        return Adapter(payload.version, LoRARequest(name, slot, str(folder)))

    async def drop(self, policy: str) -> None:
        self._adapters.pop(policy, None)


class FullVersions(Versions):
    """All weights: one version for all requests, whose bytes lie in a file that the engine core maps.

    A version waits until running requests are finished, and holds new ones back meanwhile. With in-flight updates
    running samples take it between two tokens.
    """

    def __init__(self, llm: Any, in_flight: InFlightUpdates | None) -> None:
        super().__init__(llm, in_flight)
        self.version = 0
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()
        self._bound = 0  # requests that must end with the weights that they began with

    @contextlib.asynccontextmanager
    async def lease(self, request: GenerationRequest) -> AsyncIterator[Lease]:
        """The version that is loaded. Raises EngineError."""
        while not self._open.is_set():
            await self._open.wait()
        asks_base = request.min_version == BASE_MODEL
        if self.broken:
            raise EngineError(self.broken)
        if asks_base and self.version:
            raise EngineError(
                f"Request {request.request_id}: these replicas of vLLM hold version {self.version} of all weights and "
                "no longer the base model: set serving.engine to transformers, which keeps both."
            )
        check_version(request, self.version)
        bound = asks_base or self._in_flight is None
        self._bind(int(bound))
        try:
            yield Lease(BASE_MODEL if asks_base else self.version, named=not bound)
        finally:
            self._bind(-int(bound))

    def _bind(self, difference: int) -> None:
        self._bound += difference
        (self._idle.clear if self._bound else self._idle.set)()

    async def load(self, payload: WeightPayload) -> None:
        """See Engine.load_adapter. Raises EngineError."""
        file, llm = await asyncio.to_thread(self._put, payload), self._llm
        self._open.clear()
        try:
            await self._idle.wait()
            await llm.pause_generation(mode="keep", clear_cache=False)  # returns when the step under way is done
            loading = llm.collective_rpc("load_full_weights", args=(str(file),))
            await asyncio.gather(loading, asyncio.to_thread(payload.verify))
            await llm.update_weight_version(str(payload.version))  # which vLLM then names with every token
            # Keys, values and image features of the older weights. The processor's cache holds pixels, and stays.
            if not await llm.reset_prefix_cache(reset_running_requests=self._in_flight is not None):
                raise EngineError("vLLM kept keys and values of the older weights")
            await llm.reset_encoder_cache()
        except BaseException as error:
            # Generation stays paused: nothing may be sampled from weights that are half of one version.
            self.broken = f"Version {payload.version} was not loaded as a whole ({error!r}): restart the replica."
            raise EngineError(self.broken) from error
        else:
            self.version = payload.version
            await llm.resume_generation()
        finally:
            file.unlink(missing_ok=True)
            self._open.set()

    def _put(self, payload: WeightPayload) -> Path:
        """A file of the payload's bytes: a link to the one in this node's shared memory, where they lie in one."""
        file = self.root / f"v{payload.version}.safetensors"
        try:
            with enough_room(self.root):
                try:
                    os.link(require_full(payload).file, file)
                except OSError:  # it lies in none, or has been deleted
                    file.write_bytes(payload.tensors)
        except BaseException:
            file.unlink(missing_ok=True)  # a part of it would keep the memory that the next attempt needs
            raise
        return file

    async def drop(self, policy: str) -> None:
        """Does nothing: all requests have one version."""


@contextlib.contextmanager
def enough_room(root: Path) -> Iterator[None]:
    """Raise EngineError, which says what to do, where what is written inside does not fit."""
    try:
        yield
    except OSError as error:
        raise EngineError(
            f"A version cannot be written to {root} ({error.strerror or error}): free space there, or give the "
            "container a larger /dev/shm."
        ) from error
