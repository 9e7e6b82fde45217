"""The vLLM engine: vLLM's AsyncLLM on an event loop of its own, one LoRA adapter per policy version, or all weights.

vLLM computes in a child process, the engine core. What this process does for it (prompts, images, stop strings) runs
on a thread with its own event loop, so the caller's loop stays free and may be any loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from rl_vlm.config import ServingSection
from rl_vlm.engines.base import BASE_MODEL, EngineError, EngineStats, TokenStream, check_version
from rl_vlm.engines.vllm_request import DEAD, VLLMSampler
from rl_vlm.engines.vllm_setup import Counts, KVCache, engine_args, prepare_environment, start_llm
from rl_vlm.engines.vllm_weights import Adapter, AdapterFolders, FullVersions
from rl_vlm.models.images import DEFAULT_PIXELS, PixelLimits
from rl_vlm.models.loading import HeadDType, load_text_side, quiet_libraries
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
        dtype: of the weights and the adapters.
        serving: `max_context` and the `vllm` section, and `num_threads` on a machine without a GPU.
        max_lora_rank: the highest rank of an adapter, rounded up to what vLLM knows (8, 16, 32, 64, ...).
        max_loras: versions that may sample at the same time; requests of a further one wait for the oldest to finish.
        pixels: limits of an image's size in place of the processor's own.
        in_flight: running samples take a new version between two tokens, and keep or recompute their keys and values.
            Those that began before the first adapter finish without one.
        kv_cache: see KVCache; None: vLLM measures.
        full: versions are all weights of the model, not adapters (see FullVersions).
        head_dtype: float32 does not round logits to the model's type.
    """

    def __init__(
        self,
        model: Path,
        *,
        dtype: str,
        serving: ServingSection,
        max_lora_rank: int = 64,
        max_loras: int = 2,
        pixels: PixelLimits = DEFAULT_PIXELS,
        in_flight: InFlightUpdates | None = None,
        kv_cache: KVCache | None = None,
        full: bool = False,
        head_dtype: HeadDType = "model",
    ) -> None:
        prepare_environment(serving)
        quiet_libraries()
        self._text = load_text_side(model, pixels)
        self._max_num_seqs = serving.vllm.max_num_seqs
        self._in_flight = in_flight
        self._closed = False
        self._asleep = False
        self._swaps, self._last_swap_s = 0, 0.0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._loading = asyncio.Lock()
        self._counts = Counts()
        args = engine_args(model, dtype, serving, max_lora_rank, max_loras, self._text, kv_cache, full, head_dtype)
        self._gives_back = bool(args.enable_sleep_mode)
        started: Future[Any] = Future()
        self._thread = threading.Thread(
            target=self._run, args=(args, serving.num_threads, started), name="vllm-engine", daemon=True
        )
        self._thread.start()
        try:
            self._llm: Any = started.result()
        except Exception as error:
            reason = " ".join((str(error) or repr(error)).split())
            raise EngineError(f"vLLM did not start: {reason[:500]}") from error
        self._full = FullVersions(self._llm, in_flight) if full else None
        if full and in_flight:
            asyncio.run_coroutine_threadsafe(self._llm.update_weight_version("0"), self._loop).result()
        self._folders = AdapterFolders(one_slot=in_flight is not None)
        self._sampler = VLLMSampler(
            self._llm, self._text, serving.max_context, self._counts, in_flight is not None, full
        )

    @property
    def version(self) -> int:
        """The newest version that is loaded."""
        return self._full.version if self._full is not None else self._folders.newest_version

    @property
    def dead(self) -> bool:
        """Whether vLLM's engine core has died, or holds weights of no version; only a new engine helps."""
        return bool(not self._closed and (self._llm.errored or (self._full is not None and self._full.broken)))

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
        work = asyncio.run_coroutine_threadsafe(self._tracked(self._feed(request, stream)), self._loop)
        try:
            async for chunk in stream.chunks():
                yield chunk
        finally:
            work.cancel()

    async def load_adapter(self, payload: WeightPayload) -> None:
        """Serve a version to every request that starts from now on and, with in-flight updates, to those that are
        running."""
        started = time.monotonic()
        await self._call(self._load(payload))
        self._swaps += 1
        self._last_swap_s = time.monotonic() - started

    async def sleep(self) -> None:
        """See Engine. Weights and adapters stay where they are; without a GPU the memory of keys and values does,
        too."""
        await self._call(self._sleep())

    async def wake(self) -> None:
        """See Engine."""
        await self._call(self._wake())

    def stats(self) -> EngineStats:
        """Counts for metrics. `mean_batch` is the mean number of unfinished samples while there are any."""
        counts = self._counts
        images = self._llm.renderer.mm_processor_cache
        hits, total = images.make_stats() if images is not None else (0, 0)
        return EngineStats(
            requests=counts.requests,
            running=min(counts.unfinished, self._max_num_seqs),
            waiting=max(counts.unfinished - self._max_num_seqs, 0),
            prompt_tokens=counts.prompt_tokens,
            generated_tokens=counts.generated_tokens,
            progress=counts.steps,
            image_cache_hits=hits,
            image_cache_misses=total - hits,
            prefix_cache_queries=counts.prefix_queries,
            prefix_cache_hits=counts.prefix_hits,
            mean_batch=counts.sample_s / counts.busy_s if counts.busy_s else 0.0,
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
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop)
        if (outputs := self._llm.output_handler) is not None:
            self._loop.call_soon_threadsafe(outputs.cancel)  # or it would report the core's end as an error
        cores = self._llm.engine_core.resources.engine_manager.processes
        await asyncio.to_thread(self._llm.shutdown, _SHUTDOWN_S)
        for core in cores:
            await asyncio.to_thread(core.join, 5.0)  # vLLM may have killed it, and does not wait for its end
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join, 10.0)
        self._folders.close()
        if self._full is not None:
            self._full.close()

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the engine's loop and wait for it on the caller's."""
        if self._closed:
            work.close()
            raise EngineError(_CLOSED)
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._tracked(work), self._loop))
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if self._closed and not (caller and caller.cancelling()):
                raise EngineError(_CLOSED) from None
            raise

    # What follows runs on the engine's thread.

    def _run(self, args: Any, num_threads: int, started: Future[Any]) -> None:
        asyncio.set_event_loop(self._loop)

        async def start() -> Any:
            # Inside the loop, so that vLLM watches the engine core from the beginning.
            return start_llm(args, num_threads, self._counts)

        try:
            llm = self._loop.run_until_complete(start())
        except BaseException as error:
            started.set_exception(error)
        else:
            started.set_result(llm)
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
            self._loop.close()

    async def _tracked(self, work: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            return await work
        finally:
            self._tasks.discard(task)

    async def _cancel_all(self) -> None:
        for task in list(self._tasks):
            task.cancel()

    async def _load(self, payload: WeightPayload) -> None:
        if self._full is not None:
            async with self._loading:
                await self._full.load(payload)
            return
        if self._in_flight is None:
            await self._make_newest(payload, self._add)
            return
        # Not to be cut off by the caller's deadline: requests would stay paused, or tokens be given the wrong version.
        await asyncio.shield(asyncio.ensure_future(self._tracked(self._make_newest(payload, self._replace))))

    async def _make_newest(self, payload: WeightPayload, load: Callable[[Adapter], Coroutine[Any, Any, None]]) -> None:
        async with self._loading:
            adapter = await asyncio.to_thread(self._folders.write, payload)
            try:
                await load(adapter)
            except BaseException as error:
                self._folders.discard(adapter)
                if not isinstance(error, Exception):
                    raise
                # vLLM raises errors of the engine core as plain Exceptions.
                reason = DEAD if self._llm.errored else f"vLLM refused adapter version {payload.version}: {error}"
                raise EngineError(reason) from error
            self._folders.add(adapter)

    async def drop_policy(self, policy: str) -> None:
        """Forget a policy; its running requests finish."""
        await self._call(self._drop_policy(policy))

    async def _drop_policy(self, policy: str) -> None:
        async with self._loading:
            for adapter in self._folders.drop(policy):
                await self._llm.remove_lora(adapter.request.lora_int_id)

    async def _sleep(self) -> None:
        async with self._loading:
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
                    await (self._llm.wake_up(["kv_cache"]) if asked else self._llm.resume_generation())

    async def _wake(self) -> None:
        async with self._loading:
            if not self._asleep:
                return
            try:
                if self._gives_back:
                    await self._llm.wake_up(["kv_cache"])  # which also resumes
                else:
                    await self._llm.resume_generation()
            except Exception as error:
                raise EngineError(f"vLLM could not take back the memory of keys and values: {error}") from error
            self._asleep = False

    async def _add(self, adapter: Adapter) -> None:
        await self._llm.add_lora(adapter.request)

    async def _replace(self, adapter: Adapter) -> None:
        """Exchange the adapter under the running requests, between two of vLLM's steps."""
        await self._llm.pause_generation(mode="keep", clear_cache=False)  # returns when the steps under way are done
        try:
            await self._llm.add_lora(self._folders.replacing(adapter))
            await self._llm.update_weight_version(str(adapter.version))  # which vLLM then names with every token
            if self._in_flight == "recompute":
                await self._llm.reset_prefix_cache(reset_running_requests=True)  # they are prefilled anew
        finally:
            await self._llm.resume_generation()

    async def _generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        return await all_or_none([self._complete(request) for request in requests])

    async def _complete(self, request: GenerationRequest) -> Completion:
        started = time.monotonic()
        plan = await self._sampler.plan(request)
        async with self._lease(request) as (lora, version):
            # One vLLM request per sample, so that each has its own seed; the prefix cache shares the prompt.
            samples = await all_or_none(
                [self._sampler.sample(plan, number, lora) for number in range(request.sampling.n)]
            )
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
            async with self._lease(request) as (lora, stream.policy_version):
                await all_or_none(
                    [self._sampler.feed(plan, number, lora, stream) for number in range(request.sampling.n)]
                )
        except asyncio.CancelledError:
            stream.fail(EngineError(_CLOSED))  # other cancellations come from the reader, which has stopped reading
            raise
        except Exception as error:
            stream.fail(error if isinstance(error, EngineError) else EngineError(f"Generation failed: {error!r}."))

    @contextlib.asynccontextmanager
    async def _lease(self, request: GenerationRequest) -> AsyncIterator[tuple[Any, int]]:
        """vLLM's LoRARequest (or None) and its version, with which the request is sampled or at least begins."""
        if self._full is not None:
            async with self._full.lease(request) as version:
                yield None, version
            return
        if request.min_version == BASE_MODEL:
            yield None, BASE_MODEL
            return
        with self._folders.lease(request.policy) as adapter:
            check_version(request, adapter.version if adapter else 0)
            yield (adapter.request, adapter.version) if adapter else (None, 0)
