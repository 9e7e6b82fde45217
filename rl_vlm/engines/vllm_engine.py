"""The vLLM engine: vLLM's AsyncLLM on an event loop of its own, one LoRA adapter per policy version, or all weights.

vLLM computes in a child process, the engine core. What this process does for it (prompts, images, stop strings) runs
on a thread with its own event loop, so the caller's loop stays free and may be any loop.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rl_vlm.config import CommonConfig
from rl_vlm.engines.base import EngineError, EngineStats, TokenStream
from rl_vlm.engines.vllm_request import VLLMSampler
from rl_vlm.engines.vllm_setup import Counts, engine_args, prepare_environment, start_llm
from rl_vlm.engines.vllm_weights import AdapterVersions, FullVersions
from rl_vlm.models.loading import load_text_side, quiet_libraries
from rl_vlm.models.weights import WeightPayload
from rl_vlm.types import Completion, EncodedImage, GenerationRequest, InFlightUpdates, SampleChunk
from rl_vlm.waiting import all_or_none

T = TypeVar("T")

_SHUTDOWN_S = 2.0  # how long the engine core may take to end by itself
_CLOSED = "The engine is closed."


class VLLMEngine:
    """Serves a model folder with vLLM. The weights are loaded when the constructor returns.

    Args:
        model: the model folder.
        config: of the run; `model`, `serving` and what follows from them.
        in_flight: running samples take a new version between two tokens, and keep or recompute their keys and values.
            Those that began before the first adapter finish without one.
    """

    def __init__(self, model: Path, config: CommonConfig, in_flight: InFlightUpdates | None = None) -> None:
        serving, full = config.serving, config.trains_full
        prepare_environment(serving)
        quiet_libraries()
        self._text = load_text_side(model, config.model.pixels)
        self._max_num_seqs = serving.vllm.max_num_seqs
        self._closed = False
        self._asleep = False
        self._swaps, self._last_swap_s = 0, 0.0
        self._changing = asyncio.Lock()
        self._counts = Counts()
        args = engine_args(model, config, self._text)
        self._gives_back = bool(args.enable_sleep_mode)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="vllm-engine", daemon=True)
        self._thread.start()

        async def start() -> Any:
            # On the loop, so that vLLM watches the engine core from the beginning.
            llm = start_llm(args, serving.num_threads, self._counts)
            if full:
                await llm.update_weight_version("0")
            return llm

        try:
            self._llm: Any = asyncio.run_coroutine_threadsafe(start(), self._loop).result()
        except Exception as error:
            self._loop.call_soon_threadsafe(self._loop.stop)
            reason = " ".join((str(error) or repr(error)).split())
            raise EngineError(f"vLLM did not start: {reason[:500]}") from error
        self._versions = (FullVersions if full else AdapterVersions)(self._llm, in_flight)
        names = ("all" if full else "adapters") if in_flight else ""
        self._sampler = VLLMSampler(self._llm, self._text, serving.max_context, self._counts, names)

    @property
    def version(self) -> int:
        """The newest version that is loaded."""
        return self._versions.version

    @property
    def dead(self) -> bool:
        """Whether vLLM's engine core has died, or holds weights of no version; only a new engine helps."""
        return bool(not self._closed and (self._llm.errored or self._versions.broken))

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Answer all requests, in order. Cancelling the call aborts them in vLLM.

        vLLM does not report when it starts a request: `generate_s` includes the time in its queue, `queue_s` is 0.
        """
        if not requests:
            return []
        return await self._call(self._generate(list(requests)))

    async def stream(self, request: GenerationRequest) -> AsyncIterator[SampleChunk]:
        """Answer one request token by token, or a few at a time where the reader is slower than vLLM.

        Closing the iterator aborts the request in vLLM.
        """
        if self._closed:
            raise EngineError(_CLOSED)
        stream = TokenStream(request.sampling.n)
        work = asyncio.run_coroutine_threadsafe(self._feed(request, stream), self._loop)
        try:
            async for chunk in stream.chunks():
                yield chunk
        finally:
            work.cancel()

    async def load_adapter(self, payload: WeightPayload) -> None:
        """Serve a version to every request that starts from now on and, with in-flight updates, to those that are
        running."""
        started = time.monotonic()

        async def load() -> None:
            # Not to be cut off by the caller's deadline: requests would stay paused, tokens be given the wrong version,
            # or the weights be half of one.
            await asyncio.shield(self._alone(self._versions.load(payload)))

        await self._call(load())
        self._swaps += 1
        self._last_swap_s = time.monotonic() - started

    async def sleep(self) -> None:
        """See Engine. Weights and adapters stay where they are; without a GPU the memory of keys and values does,
        too."""
        await self._call(self._alone(self._sleep()))

    async def wake(self) -> None:
        """See Engine."""
        await self._call(self._alone(self._wake()))

    async def drop_policy(self, policy: str) -> None:
        """Forget a policy; its running requests finish."""
        await self._call(self._alone(self._versions.drop(policy)))

    def stats(self) -> EngineStats:
        """Counts for metrics."""
        counts, unfinished = self._counts, self._llm.get_num_unfinished_requests()
        images = self._llm.renderer.mm_processor_cache
        hits, total = images.make_stats() if images is not None else (0, 0)
        return EngineStats(
            requests=counts.requests,
            running=min(unfinished, self._max_num_seqs),
            waiting=max(unfinished - self._max_num_seqs, 0),
            prompt_tokens=counts.prompt_tokens,
            generated_tokens=counts.generated_tokens,
            progress=counts.steps,
            image_cache_hits=hits,
            image_cache_misses=total - hits,
            prefix_cache_queries=counts.prefix_queries,
            prefix_cache_hits=counts.prefix_hits,
            mean_batch=counts.generated_tokens / max(counts.steps, 1),
            adapter_swaps=self._swaps,
            last_swap_s=self._last_swap_s,
        )

    def encode_images(self, images: Sequence[EncodedImage]) -> None:
        """Does nothing: vLLM keeps no features between requests."""

    async def close(self) -> None:
        """End vLLM and delete the adapters' files; calls that wait get an EngineError."""
        if self._closed:
            return
        self._closed = True
        self._loop.call_soon_threadsafe(self._cancel_all)
        cores = self._llm.engine_core.resources.engine_manager.processes
        await asyncio.to_thread(self._llm.shutdown, _SHUTDOWN_S)
        for core in cores:
            await asyncio.to_thread(core.join, 5.0)  # vLLM may have killed it, and does not wait for its end
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join, 10.0)
        self._versions.close()

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the engine's loop and wait for it on the caller's."""
        if self._closed:
            work.close()
            raise EngineError(_CLOSED)
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._closed and not (caller and caller.cancelling()):
                raise EngineError(_CLOSED) from None
            raise

    # What follows runs on the engine's thread.

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    def _cancel_all(self) -> None:
        # Also vLLM's own, which would report the end of the engine core as an error.
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    async def _alone(self, work: Coroutine[Any, Any, T]) -> T:
        """One change of weights or memory at a time."""
        async with self._changing:
            return await work

    async def _sleep(self) -> None:
        if self._asleep:
            return
        asked = False
        try:
            await self._llm.pause_generation(mode="wait")  # returns when nothing runs, and empties the caches
            if self._gives_back:
                asked = True
                await self._llm.release_kv_cache_memory()
            self._asleep = True
        except Exception as error:
            raise EngineError(f"vLLM did not give back the memory of keys and values: {error}") from error
        finally:
            if not self._asleep:  # also where the caller's deadline has passed: requests would wait for ever
                # vLLM may still release the memory, and must not compute without it.
                await self._resume(took_memory=asked)

    async def _wake(self) -> None:
        if not self._asleep:
            return
        try:
            await self._resume(took_memory=self._gives_back)
        except Exception as error:
            raise EngineError(f"vLLM could not take back the memory of keys and values: {error}") from error
        self._asleep = False

    async def _resume(self, took_memory: bool) -> None:
        await (self._llm.wake_up(["kv_cache"]) if took_memory else self._llm.resume_generation())

    async def _generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        return await all_or_none([self._complete(request) for request in requests])

    async def _complete(self, request: GenerationRequest) -> Completion:
        started = time.monotonic()
        plan = await self._sampler.plan(request)
        async with self._versions.lease(request) as (adapter, version):
            # One vLLM request per sample, so that each has its own seed; the prefix cache shares the prompt.
            numbers = range(request.sampling.n)
            samples = await all_or_none([self._sampler.sample(plan, number, adapter) for number in numbers])
        return Completion(
            request_id=request.request_id,
            prompt_ids=plan.expanded,
            samples=tuple(samples),
            policy_version=min(first for sample in samples for _, first in sample.pieces or ((0, version),)),
            generate_s=time.monotonic() - started,
            policy=request.policy,
        )

    async def _feed(self, request: GenerationRequest, stream: TokenStream) -> None:
        """Put the request's tokens into the stream as they come, and its error if it has one."""
        try:
            plan = await self._sampler.plan(request)
            async with self._versions.lease(request) as (adapter, stream.policy_version):
                numbers = range(request.sampling.n)
                await all_or_none([self._sampler.sample(plan, number, adapter, stream) for number in numbers])
        except asyncio.CancelledError:
            stream.fail(EngineError(_CLOSED))  # other cancellations come from the reader, which has stopped reading
            raise
        except Exception as error:
            stream.fail(error if isinstance(error, EngineError) else EngineError(f"Generation failed: {error!r}."))
