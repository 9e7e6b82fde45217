"""The vLLM engine: vLLM's AsyncLLM on an event loop of its own, one LoRA adapter per policy version.

vLLM computes in a child process, the engine core. What this process does for it (prompts, images, stop strings) runs
on a thread with its own event loop, so the caller's loop stays free and may be any loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rl_vlm.chat import expand_image_tokens
from rl_vlm.config import ServingSection
from rl_vlm.engines.base import BASE_MODEL, EngineError
from rl_vlm.engines.vllm_adapters import AdapterShelf
from rl_vlm.engines.vllm_setup import engine_args, prepare_environment, start_llm
from rl_vlm.models.adapter import AdapterPayload
from rl_vlm.models.loading import load_text_side, quiet_libraries
from rl_vlm.types import Completion, EncodedImage, GenerationRequest, Sample, SamplingParams, StopReason, UserInputError

T = TypeVar("T")

_SHUTDOWN_S = 2.0  # how long the engine core may take to end by itself
# vLLM silently raises lower temperatures to 0.01 and refuses higher ones.
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 0.01, 2.0
_SEED_MASK = 2**63 - 1
_DEAD = "vLLM's engine core has died, its log says why: restart the replica."
_CLOSED = "The engine is closed."


class VLLMEngine:
    """Serves a model folder with vLLM. The weights are loaded when the constructor returns.

    Args:
        model: the model folder.
        dtype: of the weights and the adapters.
        serving: `max_context` and the `vllm` section, and `num_threads` on a machine without a GPU.
        max_lora_rank: the highest rank of an adapter, rounded up to what vLLM knows (8, 16, 32, 64, ...).
        max_loras: versions that may sample at the same time; requests of a further one wait for the oldest to finish.
    """

    def __init__(
        self, model: Path, *, dtype: str, serving: ServingSection, max_lora_rank: int = 64, max_loras: int = 2
    ) -> None:
        prepare_environment(serving)
        quiet_libraries()
        self._text = load_text_side(model)
        self._max_context = serving.max_context
        self._closed = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._loading = asyncio.Lock()
        args = engine_args(model, dtype, serving, max_lora_rank, max_loras, self._text)
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
        self._shelf = AdapterShelf()

    @property
    def version(self) -> int:
        """The newest adapter version that is loaded."""
        newest = self._shelf.newest
        return newest.version if newest else 0

    @property
    def dead(self) -> bool:
        """Whether vLLM's engine core has died; only a new engine helps."""
        return bool(not self._closed and self._llm.errored)

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Answer all requests, in order. Cancelling the call aborts them in vLLM.

        vLLM does not tell when it starts with a request: `generate_s` includes the time in its queue, `queue_s` is 0.
        """
        return await self._call(self._generate(list(requests))) if requests else []

    async def load_adapter(self, payload: AdapterPayload) -> None:
        """Serve a version to every request that starts from now on."""
        await self._call(self._load(payload))

    async def close(self) -> None:
        """End vLLM and delete the adapters' files; calls that wait get an EngineError."""
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop)
        cores = self._llm.engine_core.resources.engine_manager.processes
        await asyncio.to_thread(self._llm.shutdown, _SHUTDOWN_S)
        for core in cores:
            await asyncio.to_thread(core.join, 5.0)  # vLLM may have killed it, and does not wait for its end
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join, 10.0)
        self._shelf.close()

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
            return start_llm(args, num_threads)

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

    async def _load(self, payload: AdapterPayload) -> None:
        async with self._loading:
            adapter = await asyncio.to_thread(self._shelf.write, payload)
            try:
                await self._llm.add_lora(adapter.request)
            except BaseException as error:
                self._shelf.discard(adapter)
                if not isinstance(error, Exception):
                    raise
                # vLLM passes what happened in the engine core on as a plain Exception.
                reason = _DEAD if self._llm.errored else f"vLLM refused adapter version {payload.version}: {error}"
                raise EngineError(reason) from error
            self._shelf.add(adapter, payload.sha256)

    async def _generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        return await _all_or_none([self._complete(request) for request in requests])

    async def _complete(self, request: GenerationRequest) -> Completion:
        started = time.monotonic()
        expanded = self._expand(request)
        prompt: dict[str, Any] = {"prompt_token_ids": request.prompt_ids.tolist()}
        if request.images:
            prompt["multi_modal_data"] = {"image": await asyncio.to_thread(_decode, request.images)}
            prompt["multi_modal_uuids"] = {"image": [image.sha256 for image in request.images]}
        base_model = request.min_version == BASE_MODEL
        with contextlib.nullcontext() if base_model else self._shelf.lease() as adapter:
            # One vLLM request per sample, so that each has its own seed; the prefix cache shares the prompt.
            lora = adapter.request if adapter else None
            samples = await _all_or_none(
                [self._sample(request, k, prompt, expanded, lora) for k in range(request.sampling.n)]
            )
            version = BASE_MODEL if base_model else adapter.version if adapter else 0
        return Completion(
            request_id=request.request_id,
            prompt_ids=expanded,
            samples=tuple(samples),
            policy_version=version,
            generate_s=time.monotonic() - started,
        )

    def _expand(self, request: GenerationRequest) -> np.ndarray:
        """int32 prompt ids with every image placeholder expanded; raises EngineError for what cannot be sampled."""
        name, sampling = request.request_id, request.sampling
        try:
            counts = [self._text.count_image_tokens(image.width, image.height) for image in request.images]
            ids = expand_image_tokens(request.prompt_ids, self._text.codec.image_token_id, counts, name)
        except UserInputError as error:
            raise EngineError(f"Request {name}: {error}") from error
        if len(ids) + sampling.max_new_tokens > self._max_context:
            raise EngineError(
                f"Request {name}: {len(ids)} prompt tokens and {sampling.max_new_tokens} new ones exceed the context "
                f"of {self._max_context}: raise serving.max_context or send less."
            )
        if sampling.temperature and not _MIN_TEMPERATURE <= sampling.temperature <= _MAX_TEMPERATURE:
            raise EngineError(
                f"Request {name}: vLLM samples at temperature 0 or from {_MIN_TEMPERATURE} to {_MAX_TEMPERATURE}, "
                f"not at {sampling.temperature}."
            )
        return ids

    async def _sample(
        self, request: GenerationRequest, number: int, prompt: Mapping[str, Any], expanded: np.ndarray, lora: Any
    ) -> Sample:
        from vllm.exceptions import VLLMError

        name = request.request_id
        params = self._sampling_params(request.sampling, number)
        try:
            output = await self._run_request(f"{name}/{number}", prompt, params, lora)
            if output.outputs[0].finish_reason == "error":
                # The engine core dropped an image that this process believed it had: the second try sends it again.
                output = await self._run_request(f"{name}/{number}", prompt, params, lora)
        except (VLLMError, ValueError) as error:
            reason = _DEAD if self._llm.errored else f"vLLM could not answer ({error.__cause__ or error})."
            raise EngineError(f"Request {name}: {reason}") from error
        if not np.array_equal(np.asarray(output.prompt_token_ids), expanded):
            raise EngineError(
                f"Request {name}: vLLM expanded the prompt to {len(output.prompt_token_ids)} tokens, the image "
                f"processor's grids to {len(expanded)}: is the model folder's processor config its own?"
            )
        return self._read(name, output.outputs[0])

    async def _run_request(self, name: str, prompt: Mapping[str, Any], params: Any, lora: Any) -> Any:
        """One pass through vLLM; returns its RequestOutput."""
        (engine_input,) = await self._llm.renderer.render_cmpl_async([dict(prompt)])
        final = None
        async for output in self._llm.generate(engine_input, params, name, lora_request=lora):
            final = output
        assert final is not None
        return final

    def _sampling_params(self, sampling: SamplingParams, number: int) -> Any:
        from vllm import SamplingParams as VLLMSamplingParams
        from vllm.sampling_params import RequestOutputKind

        return VLLMSamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=None if sampling.seeds is None else sampling.seeds[number] & _SEED_MASK,
            max_tokens=sampling.max_new_tokens,
            stop=list(sampling.stop),
            include_stop_str_in_output=True,
            detokenize=bool(sampling.stop),
            skip_special_tokens=False,
            stop_token_ids=[self._text.codec.end_of_turn_id],
            ignore_eos=True,  # the end of a turn is the chat template's, not the generation config's
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )

    def _read(self, name: str, output: Any) -> Sample:
        tokens = np.array(output.token_ids, dtype=np.int32)
        logprobs = np.array(output.logprobs.logprobs, dtype=np.float32)
        if output.finish_reason not in ("stop", "length") or not len(tokens) or len(tokens) != len(logprobs):
            raise EngineError(
                f"Request {name}: vLLM ended a sample with {output.finish_reason!r}, {len(tokens)} tokens and "
                f"{len(logprobs)} log-probabilities."
            )
        if tokens[-1] == self._text.codec.end_of_turn_id:
            return Sample(tokens, logprobs, StopReason.END_OF_TURN)
        return Sample(tokens, logprobs, StopReason.STOP if output.finish_reason == "stop" else StopReason.LENGTH)


async def _all_or_none(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results in order; when one fails or the caller is cancelled, the others are cancelled and waited for."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _decode(images: Sequence[EncodedImage]) -> list[Any]:
    return [image.to_pil() for image in images]
