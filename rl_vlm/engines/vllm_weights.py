"""The weights of a vLLM engine: the adapter versions that requests use, or one set of all weights."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_vlm.engines.base import BASE_MODEL, EngineError, check_version
from rl_vlm.models.weights import FullPayload, WeightPayload
from rl_vlm.types import POLICY, GenerationRequest, InFlightUpdates, UserInputError

_PREFIX = "rl-vlm-adapters-"
_LEAST_MEMORY = 256 << 20  # bytes of /dev/shm: a Docker container has 64 MiB by default
_KEPT = 2  # the newest folders of a policy stay although no request uses them


@dataclass(slots=True)
class Adapter:
    """One loaded version of a policy; `request` is vLLM's LoRARequest, `users` the requests that are running with
    it."""

    version: int
    folder: Path
    request: Any
    users: int = 0
    policy: str = POLICY


class AdapterFolders:
    """The adapter folders that vLLM reads, in /dev/shm where there is room for some.

    Every version gets a new id, name and folder: vLLM keeps the old weights of an id that it knows, and its prefix
    cache tells versions apart by their names and folders. vLLM reads a folder again when it has dropped an adapter that
    a running request still needs, so a folder stays as long as a request uses it.

    With `one_slot` (in-flight updates) all versions have one id and one name: a version that is loaded with `replacing`
    takes its predecessor's place under the requests that are running.
    """

    def __init__(self, one_slot: bool = False) -> None:
        self._one_slot = one_slot
        self._root, lock = claim_root()
        self._release = weakref.finalize(self, release_root, self._root, lock)  # also run when Python exits
        self._adapters: dict[str, list[Adapter]] = {}  # by policy, oldest first
        self._dropped: list[Adapter] = []  # of dropped policies, still in use
        self._next_id = 1

    def newest(self, policy: str = POLICY) -> Adapter | None:
        """The version of a policy that was added last."""
        versions = self._adapters.get(policy)
        return versions[-1] if versions else None

    @property
    def newest_version(self) -> int:
        """The highest version of any policy."""
        return max((versions[-1].version for versions in list(self._adapters.values())), default=0)

    def write(self, payload: WeightPayload) -> Adapter:
        """Write a version's folder; the version is not in use before `add`. Raises EngineError for one that vLLM
        cannot serve."""
        from vllm.lora.request import LoRARequest

        payload.verify()
        unsupported = [name for name in payload.state() if ".language_model." not in name]
        if unsupported:
            # vLLM would silently ignore an adapted vision tower.
            raise EngineError(
                f"Adapter version {payload.version} adapts {unsupported[0]}: only the language model's linear layers "
                "may be."
            )
        number, self._next_id = self._next_id, self._next_id + 1
        with enough_room(self._root):
            folder = payload.write(self._root / f"v{payload.version}-{number}")
        # The number too: a policy may be dropped, and its name and versions come again with other weights.
        several = f"{payload.policy}-v{payload.version}-{number}"
        named = several if payload.policy != POLICY else f"{POLICY}-v{payload.version}"
        name, slot = (POLICY, 1) if self._one_slot else (named, number)
        return Adapter(payload.version, folder, LoRARequest(name, slot, str(folder)), policy=payload.policy)

    @staticmethod
    def replacing(adapter: Adapter) -> Any:
        """The LoRARequest that loads a version over the one that has its id. Only to be used between vLLM's steps."""
        from vllm.lora.request import LoRARequest

        known = adapter.request
        return LoRARequest(known.lora_name, known.lora_int_id, known.lora_path, load_inplace=True)

    def add(self, adapter: Adapter) -> None:
        """Make a written version the newest, and delete the folders of old versions that no request uses."""
        of_policy = self._adapters.setdefault(adapter.policy, [])
        of_policy.append(adapter)
        for old in [other for other in of_policy[:-_KEPT] if not other.users]:
            of_policy.remove(old)
            self.discard(old)
        self._discard_dropped()

    def drop(self, policy: str) -> list[Adapter]:
        """Forget a policy; its folders go once no request uses them. Returns its adapters that none uses."""
        gone = self._adapters.pop(policy, [])
        self._dropped += gone
        self._discard_dropped()
        return [adapter for adapter in gone if not adapter.users]

    def _discard_dropped(self) -> None:
        for adapter in [adapter for adapter in self._dropped if not adapter.users]:
            self._dropped.remove(adapter)
            self.discard(adapter)

    def discard(self, adapter: Adapter) -> None:
        """Delete a version's folder."""
        shutil.rmtree(adapter.folder, ignore_errors=True)

    @contextlib.contextmanager
    def lease(self, policy: str = POLICY) -> Iterator[Adapter | None]:
        """The newest version of a policy, for the whole of one request."""
        adapter = self.newest(policy)
        if adapter is None:
            yield None
            return
        adapter.users += 1
        try:
            yield adapter
        finally:
            adapter.users -= 1

    def close(self) -> None:
        """Delete all folders."""
        self._release()


def claim_root() -> tuple[Path, int]:
    """A new folder, and the descriptor that locks it. Folders of engines that were killed are deleted.

    The lock shows whether the owner is alive; process ids do not, because containers may share /dev/shm.
    """
    memory = Path("/dev/shm")
    usable = os.access(memory, os.W_OK) and shutil.disk_usage(memory).total >= _LEAST_MEMORY
    base = memory if usable else Path(tempfile.gettempdir())
    for stale in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(stale, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises BlockingIOError while its owner lives
                shutil.rmtree(stale, ignore_errors=True)
            finally:
                os.close(descriptor)
    # Locked under a name that the clean-up above does not match, then renamed.
    draft = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=base))
    descriptor = os.open(draft, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return draft.rename(draft.with_name(draft.name[1:])), descriptor


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


def release_root(root: Path, lock: int) -> None:
    """Delete the folder of `claim_root` and give its lock back."""
    shutil.rmtree(root, ignore_errors=True)
    os.close(lock)


# Full weights in a vLLM engine: one set for all requests, exchanged while none is sampled.


class FullVersions:
    """The version of an AsyncLLM's weights, and its exchange. To be used on the event loop that the AsyncLLM was made
    on.

    A version waits until the requests that run are finished, and holds new ones back meanwhile. With in-flight updates
    running samples take it between two tokens. Its bytes go through a file in /dev/shm, where the engine core maps
    them.

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
                f"Request {request.request_id}: these replicas of vLLM hold version {self.version} of all weights and "
                "no longer the base model: set serving.engine to transformers, which keeps both."
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
        await llm.resume_generation()

    def _write(self, payload: WeightPayload) -> Path:
        if not isinstance(payload, FullPayload):
            raise UserInputError(
                f"Version {payload.version} is an adapter, and these replicas serve full weights: set model.train to "
                "lora."
            )
        payload.verify()
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
