"""The transformers engine: continuous batching on a thread of its own, adapters merged into the weights.

It serves one adapter version at a time. Requests for a newer version wait until the running samples of the older one
are finished, so every sample is drawn from one version from its first token to its last.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from rl_vlm.engines.base import BASE_MODEL, EngineError
from rl_vlm.engines.decoder import Decoder, Job
from rl_vlm.models.adapter import AdapterPayload
from rl_vlm.models.backbone import Backbone
from rl_vlm.models.loading import DType, load_model, load_text_side, quiet_libraries
from rl_vlm.models.lora import linear_weights, merged_weights
from rl_vlm.types import Completion, GenerationRequest


@dataclass(slots=True, eq=False)
class _Call:
    """One `generate` call: its requests, its answers as they come, and the future that waits for all of them.

    Compared by identity: two calls may ask the same.
    """

    requests: list[GenerationRequest]
    future: asyncio.Future[list[Completion]]
    loop: asyncio.AbstractEventLoop
    answers: dict[int, Completion] = field(default_factory=dict)
    admitted: int = 0
    jobs: list[Job] = field(default_factory=list)
    over: bool = False  # cancelled or refused: nothing of it starts any more

    @property
    def base_model(self) -> bool:
        return self.requests[0].min_version == BASE_MODEL


class TransformersEngine:
    """Serves a model folder with transformers.

    Args:
        model: the model folder.
        dtype: of the weights; adapters are merged in float32 and rounded to it.
        device: "cpu" or "cuda".
        max_context: prompt plus new tokens of a sample.
        max_rows: samples that run at once.
        lockstep: run each call as one batch that nobody joins, so that the batch, and with it every bit of the result,
            depends on the call alone.
        num_threads: torch threads of this process; None leaves torch's setting.
    """

    def __init__(
        self,
        model: Path,
        *,
        dtype: DType = "float32",
        device: str = "cpu",
        max_context: int = 4096,
        max_rows: int = 512,
        lockstep: bool = False,
        num_threads: int | None = 1,
    ) -> None:
        quiet_libraries()
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        text = load_text_side(model)
        self._model = load_model(model, dtype, device)
        self.backbone = Backbone(self._model, text.images, text.codec.suppressed_token_ids(text.vocab_size))
        self._decoder = Decoder(
            self.backbone,
            image_token_id=text.codec.image_token_id,
            end_of_turn_id=text.codec.end_of_turn_id,
            pad_token_id=text.codec.pad_token_id,
            max_context=max_context,
            decode=text.codec.decode,
        )
        self._base = linear_weights(self._model)
        self._linears = {name: self._model.get_submodule(name) for name in self._base}
        self._max_rows = max_rows
        self._lockstep = lockstep
        self._version = 0
        self._merged: dict[str, torch.Tensor] = {}  # of the newest version
        self._active = BASE_MODEL  # the version whose weights are in place
        self._running_base = False
        self._open: set[_Call] = set()  # calls without an answer
        self._waiting: deque[_Call] = deque()  # those of them that are not admitted whole
        self._pending: tuple[AdapterPayload, asyncio.Future[None], asyncio.AbstractEventLoop] | None = None
        self._owners: dict[int, tuple[_Call, int]] = {}  # id(job) -> its call and place in it
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="transformers-engine", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        """The newest adapter version that is loaded."""
        return self._version

    @property
    def dead(self) -> bool:
        """Whether the engine's thread has ended without being told to."""
        return not (self._closed or self._thread.is_alive())

    @property
    def num_waiting(self) -> int:
        """Calls that no sample has started for."""
        return len(self._waiting)

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Answer all requests, in order. Cancelling the call frees its rows at the next step."""
        if not requests:
            return []
        if len({request.min_version == BASE_MODEL for request in requests}) > 1:
            raise EngineError("Requests for the base model and for the policy cannot share a call: send two calls.")
        loop = asyncio.get_running_loop()
        call = _Call(list(requests), loop.create_future(), loop)
        with self._wake:
            if self._closed:
                raise EngineError("The engine is closed.")
            self._open.add(call)
            self._waiting.append(call)
            self._wake.notify()
        try:
            return await call.future
        except asyncio.CancelledError:
            self._drop(call)
            raise

    async def load_adapter(self, payload: AdapterPayload) -> None:
        """Merge a version and serve it to every request that starts from now on."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()
        with self._wake:
            if self._closed:
                raise EngineError("The engine is closed.")
            if self._pending is not None:
                raise EngineError("An adapter is being loaded already: load one at a time.")
            self._pending = (payload, future, loop)
            self._wake.notify()
        await future

    async def close(self) -> None:
        """Stop the thread; calls that wait get an EngineError."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, 30.0)

    def _drop(self, call: _Call) -> None:
        """Nobody waits for this call any more: its rows are free at the next step."""
        with self._wake:
            call.over = True
            self._open.discard(call)
            if call in self._waiting:
                self._waiting.remove(call)
            for job in call.jobs:
                job.cancelled = True

    # What follows runs on the engine's thread.

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (self._closed or self._pending or self._waiting or self._decoder.num_rows):
                    self._wake.wait()
                if self._closed:
                    break
            try:
                self._load_pending()
                self._admit()
                if self._decoder.num_rows:
                    self._finish(self._decoder.step())
            except Exception as error:
                self._fail(error)
        self._fail(EngineError("The engine is closed."))

    def _load_pending(self) -> None:
        with self._wake:
            # The weights in place may not change under samples that are running.
            if self._pending is None or self._decoder.num_rows:
                return
            payload, future, loop = self._pending
            self._pending = None
        try:
            self._merged = merged_weights(self._model, payload.verify(), self._base)
            self._version = payload.version
            self._active = BASE_MODEL - 1  # neither: the next admission puts weights in place
        except Exception as error:
            _resolve(loop, future, error=error)
            return
        _resolve(loop, future)

    def _activate(self, base_model: bool) -> None:
        wanted = BASE_MODEL if base_model or not self._version else self._version
        if wanted != self._active:
            weights = self._base if wanted == BASE_MODEL else {**self._base, **self._merged}
            for name, linear in self._linears.items():
                linear.weight.data = weights[name]  # type: ignore[union-attr]
            self._active = wanted

    def _admit(self) -> None:
        if self._pending is not None:
            return  # let the running samples finish first
        batch: list[tuple[_Call, int, GenerationRequest]] = []
        rows = self._decoder.num_rows
        with self._wake:
            while self._waiting:
                call = self._waiting[0]
                busy = rows > 0 and (self._lockstep or call.base_model != self._running_base)
                if busy:
                    break
                while call.admitted < len(call.requests):
                    request = call.requests[call.admitted]
                    if rows and rows + request.sampling.n > self._max_rows and not self._lockstep:
                        break
                    batch.append((call, call.admitted, request))
                    rows += request.sampling.n
                    call.admitted += 1
                self._running_base = call.base_model
                if call.admitted < len(call.requests):
                    break
                self._waiting.popleft()
        if not batch:
            return
        self._activate(self._running_base)
        prepared = self._decoder.prepare([request for _, _, request in batch])
        for (call, _, _), job in zip(batch, prepared, strict=True):
            if isinstance(job, EngineError):
                self._refuse(call, job)
        live: list[Job] = []
        with self._wake:  # a call may be cancelled while its images are encoded
            for (call, place, _), job in zip(batch, prepared, strict=True):
                if isinstance(job, Job) and not call.over:
                    call.jobs.append(job)
                    self._owners[id(job)] = (call, place)
                    live.append(job)
        if live:
            self._finish(self._decoder.admit(live))

    def _finish(self, jobs: Sequence[Job]) -> None:
        version = BASE_MODEL if self._running_base else self._version
        for job in jobs:
            call, place = self._owners.pop(id(job))
            call.answers[place] = self._decoder.completion(job, version)
            if len(call.answers) == len(call.requests):
                with self._wake:
                    self._open.discard(call)
                _resolve(call.loop, call.future, [call.answers[k] for k in range(len(call.requests))])

    def _refuse(self, call: _Call, error: Exception) -> None:
        self._drop(call)
        _resolve(call.loop, call.future, error=error)

    def _fail(self, error: Exception) -> None:
        """Fail everything that runs or waits; the engine itself goes on unless it is closed."""
        self._decoder.clear()
        with self._wake:
            calls = list(self._open)
            self._open.clear()
            self._waiting.clear()
            self._owners.clear()
            pending, self._pending = self._pending, None
        wrapped = error if isinstance(error, EngineError) else EngineError(f"Generation failed: {error!r}.")
        for call in calls:
            _resolve(call.loop, call.future, error=wrapped)
        if pending is not None:
            _resolve(pending[2], pending[1], error=wrapped)


def _resolve(
    loop: asyncio.AbstractEventLoop,
    future: asyncio.Future,  # type: ignore[type-arg]
    result: object = None,
    error: Exception | None = None,
) -> None:
    """Settle a future of another thread's event loop, unless it is settled or its loop is gone."""

    def settle() -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits
        loop.call_soon_threadsafe(settle)
