"""The vLLM engine: vLLM's AsyncLLM on an event loop of its own, one LoRA adapter per policy version, or all weights.

vLLM computes in a child process, the engine core. What this process does for it (prompts, images, stop strings) runs
on a thread of its own, so the caller's loop stays free and may be any loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from rl_vlm.chat import ChatCodec
from rl_vlm.config import CommonConfig
from rl_vlm.config.serving import VLLM_TEMPERATURES
from rl_vlm.engines.base import EngineError, EngineStats, expand_prompt, naming
from rl_vlm.engines.grammars import Grammars
from rl_vlm.engines.streams import NewTokens, TokenStream, notify
from rl_vlm.engines.vllm_setup import DEAD, engine_args, prepare_environment, start_llm
from rl_vlm.engines.vllm_weights import AdapterVersions, FullVersions, Lease
from rl_vlm.models.loading import load_text_side, quiet_libraries
from rl_vlm.models.weights import WeightPayload
from rl_vlm.types import (
    Completion,
    EncodedImage,
    GenerationRequest,
    InFlightUpdates,
    Sample,
    SampleChunk,
    SamplingParams,
    StopReason,
    TopLogprobs,
)
from rl_vlm.waiting import all_or_none

T = TypeVar("T")

_SHUTDOWN_S = 2.0  # how long the engine core may take to end by itself
_CLOSED = "The engine is closed."
_SEED_MASK = 2**63 - 1


class Plan(NamedTuple):
    """What all samples of a request have in common."""

    request: GenerationRequest
    expanded: np.ndarray  # the prompt int32 [P] with all placeholders
    grammar: str | None  # llguidance's Lark
    prompt: Mapping[str, Any]  # what vLLM is given
    lease: Lease
    stream: TokenStream | None
    scores: list[TopLogprobs]  # of the prompt, once they are known


class VLLMEngine:
    """Serves a model folder with vLLM. The weights are loaded when the constructor returns.

    `in_flight`: running samples take a new version between two tokens, and keep or recompute their keys and values.
    Those that began before the first adapter finish without one.
    """

    def __init__(self, model: Path, config: CommonConfig, in_flight: InFlightUpdates | None = None) -> None:
        serving, full = config.serving, config.trains_full
        prepare_environment(serving)
        quiet_libraries()
        self._text = load_text_side(model, config.model.pixels)
        self._grammars = Grammars(self._text)
        self._max_num_seqs, self._max_context = serving.vllm.max_num_seqs, serving.max_context
        self._closed = False
        self._asleep = False
        self._swaps, self._last_swap_s = 0, 0.0
        self._changing = asyncio.Lock()
        self._counts: Counter[str] = Counter()
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

    @property
    def version(self) -> int:
        return self._versions.version

    @property
    def dead(self) -> bool:
        """Whether vLLM's engine core has died, or holds weights of no version."""
        return bool(not self._closed and (self._llm.errored or self._versions.broken))

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """See Engine. vLLM does not report when it starts a request: `generate_s` includes the time in its queue."""

        async def answers() -> list[Completion]:
            return await all_or_none([self._complete(request) for request in requests])

        return await self._call(answers()) if requests else []

    async def stream(self, request: GenerationRequest) -> AsyncIterator[SampleChunk]:
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
        started = time.monotonic()

        async def load() -> None:
            # Must not end with the caller's deadline: requests would stay paused, tokens get the wrong version, or the
            # weights be half of one.
            await asyncio.shield(self._alone(self._versions.load(payload)))

        await self._call(load())
        self._swaps += 1
        self._last_swap_s = time.monotonic() - started

    async def sleep(self) -> None:
        """See Engine. Weights stay where they are; without a GPU the memory of keys and values does, too."""
        await self._call(self._alone(self._sleep()))

    async def wake(self) -> None:
        await self._call(self._alone(self._wake()))

    async def drop_policy(self, policy: str) -> None:
        await self._call(self._alone(self._versions.drop(policy)))

    def stats(self) -> EngineStats:
        counts, unfinished = self._counts, self._llm.get_num_unfinished_requests()
        images = self._llm.renderer.mm_processor_cache
        hits, total = images.make_stats() if images is not None else (0, 0)
        return EngineStats(
            requests=counts["requests"],
            running=min(unfinished, self._max_num_seqs),
            waiting=max(unfinished - self._max_num_seqs, 0),
            prompt_tokens=counts["prompt_tokens"],
            generated_tokens=counts["generated_tokens"],
            progress=counts["steps"],
            image_cache_hits=hits,
            image_cache_misses=total - hits,
            prefix_cache_queries=counts["prefix_queries"],
            prefix_cache_hits=counts["prefix_hits"],
            mean_batch=counts["generated_tokens"] / max(counts["steps"], 1),
            adapter_swaps=self._swaps,
            last_swap_s=self._last_swap_s,
        )

    def encode_images(self, images: Sequence[EncodedImage]) -> None:
        """Does nothing: vLLM keeps no features between requests."""

    async def close(self) -> None:
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

    async def _complete(self, request: GenerationRequest, stream: TokenStream | None = None) -> Completion:
        """The answer; of a request with a stream, which gets all tokens, the last ones alone. Raises EngineError."""
        started = time.monotonic()
        name, sampling, codec = request.request_id, request.sampling, self._text.codec
        ids = expand_prompt(request, self._text, self._max_context)
        lowest, highest = VLLM_TEMPERATURES
        if sampling.temperature and not lowest <= sampling.temperature <= highest:
            raise EngineError(
                f"Request {name}: vLLM samples at temperature 0 or from {lowest} to {highest}, not at "
                f"{sampling.temperature}."
            )
        with naming(request):  # text that cannot be written, or a damaged image
            await asyncio.to_thread(self._grammars.matcher, sampling)  # a bad grammar would stop vLLM's own core
            grammar = self._grammars.lark(sampling)
            prompt = await vllm_prompt(request, codec)
        self._counts["requests"] += 1
        self._counts["prompt_tokens"] += len(ids)
        async with self._versions.lease(request) as lease:
            if stream is not None:
                stream.policy_version = lease.version
            plan = Plan(request, ids, grammar, prompt, lease, stream, [])
            # One vLLM request per sample, so that each has its own seed; the prefix cache shares the prompt.
            samples = await all_or_none([self._sample(plan, number) for number in range(sampling.n)])
        return Completion(
            request_id=name,
            prompt_ids=ids,
            samples=tuple(samples),
            policy_version=min(first for sample in samples for _, first in sample.pieces or ((0, lease.version),)),
            generate_s=time.monotonic() - started,
            policy=request.policy,
            prompt_logprobs=tuple(plan.scores),
        )

    async def _feed(self, request: GenerationRequest, stream: TokenStream) -> None:
        """Put the request's tokens into the stream as they come, and its error if it has one."""
        try:
            await self._complete(request, stream)
        except asyncio.CancelledError:
            stream.fail(EngineError(_CLOSED))  # other cancellations come from the reader, which has stopped reading
            raise
        except Exception as error:
            stream.fail(error if isinstance(error, EngineError) else EngineError(f"Generation failed: {error!r}."))

    async def _sample(self, plan: Plan, number: int) -> Sample:
        from vllm.exceptions import VLLMError

        sampling, end = plan.request.sampling, self._text.codec.end_of_turn_id
        params = vllm_params(sampling, number, end, plan.grammar, pieces=plan.stream is not None)
        try:
            output = await self._run_request(plan, number, params)
            if output.finish_reason == "error":
                # The engine core had evicted an image that this process took for cached: now it is sent again.
                output = await self._run_request(plan, number, params)
        except (VLLMError, ValueError) as error:
            reason = DEAD if self._llm.errored else f"vLLM could not answer ({error.__cause__ or error})."
            raise EngineError(f"Request {plan.request.request_id}: {reason}") from error
        new = read_tokens(output, sampling.top_logprobs)
        return Sample(
            np.array(new.token_ids, dtype=np.int32),
            np.array(new.logprobs, dtype=np.float32),
            self._stop_reason(plan, output, new),
            tuple(new.top_logprobs),
            tuple((s.end - s.start, int(s.version)) for s in output.weight_versions) if plan.lease.named else (),
        )

    async def _run_request(self, plan: Plan, number: int, params: Any) -> Any:
        """One pass through vLLM; returns its last CompletionOutput."""
        (engine_input,) = await self._llm.renderer.render_cmpl_async([dict(plan.prompt)])
        name, last = f"{plan.request.request_id}/{number}", None
        lora = plan.lease.adapter.request if plan.lease.adapter is not None else None
        async with contextlib.aclosing(self._llm.generate(engine_input, params, name, lora_request=lora)) as results:
            async for result in results:
                if last is None:
                    self._check_prompt(plan, result)
                if result.prompt_logprobs is not None:
                    plan.scores[:] = read_places(result.prompt_logprobs)[1:]
                last = result.outputs[0]
                if plan.stream is not None and last.finish_reason != "error":
                    new = read_tokens(last, plan.request.sampling.top_logprobs)
                    new.stop_reason = self._stop_reason(plan, last, new) if last.finish_reason else None
                    if plan.lease.named:
                        # Versions change while vLLM is paused, when the last token of the older one has been read.
                        plan.stream.policy_version = self._counts["policy_version"]
                    plan.stream.put(number, new)
                    notify([plan.stream])
        assert last is not None
        return last

    def _check_prompt(self, plan: Plan, result: Any) -> None:
        if not np.array_equal(np.asarray(result.prompt_token_ids), plan.expanded):
            raise EngineError(
                f"Request {plan.request.request_id}: vLLM expanded the prompt to {len(result.prompt_token_ids)} "
                f"tokens, the image processor's grids to {len(plan.expanded)}: is the model folder's processor config "
                "its own?"
            )
        self._counts["prefix_queries"] += len(plan.expanded)
        self._counts["prefix_hits"] += result.num_cached_tokens or 0

    def _stop_reason(self, plan: Plan, output: Any, new: NewTokens) -> StopReason:
        tokens = new.token_ids
        if output.finish_reason not in ("stop", "length") or not tokens or len(tokens) != len(new.logprobs):
            raise EngineError(
                f"Request {plan.request.request_id}: vLLM ended a sample with {output.finish_reason!r}, {len(tokens)} "
                f"tokens and {len(new.logprobs)} log-probabilities."
            )
        if tokens[-1] == self._text.codec.end_of_turn_id and not plan.request.sampling.ignore_eos:
            return StopReason.END_OF_TURN
        return StopReason.STOP if output.finish_reason == "stop" else StopReason.LENGTH


# Prompts and sampling parameters as vLLM takes them, and its outputs as ours.


def vllm_params(sampling: SamplingParams, number: int, end_of_turn_id: int, grammar: str | None, pieces: bool) -> Any:
    """vLLM's SamplingParams for sample `number` of a request; `pieces`: outputs come token by token, not whole."""
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

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
        stop_token_ids=[] if sampling.ignore_eos else [end_of_turn_id],
        min_p=sampling.min_p,
        min_tokens=sampling.min_tokens,
        repetition_penalty=sampling.repetition_penalty,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        ignore_eos=True,  # the end of a turn is the chat template's, not the generation config's
        logprobs=sampling.top_logprobs,  # beside the sampled token's own
        prompt_logprobs=sampling.prompt_logprobs if number == 0 else None,
        logit_bias=dict(sampling.logit_bias) or None,
        bad_words=list(sampling.bad_words),
        flat_logprobs=True,
        structured_outputs=StructuredOutputsParams(grammar=grammar) if grammar else None,
        output_kind=RequestOutputKind.DELTA if pieces else RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def read_tokens(output: Any, top: int) -> NewTokens:
    """The tokens of a vLLM CompletionOutput; `top`: how many alternatives were asked for."""
    logprobs = [output.logprobs.logprobs[start] for start in output.logprobs.start_indices]
    places = read_places(output.logprobs) if top else []
    alternatives = [tuple(one for one in place[1:] if one[1] > -float("inf"))[:top] for place in places]
    return NewTokens(list(output.token_ids), logprobs, alternatives)


def read_places(flat: Any) -> list[TopLogprobs]:
    """vLLM's flat log-probabilities: of each place the token that is there, then the most likely ones."""
    return [
        tuple(zip(flat.token_ids[start:end], flat.logprobs[start:end], strict=True))
        for start, end in zip(flat.start_indices, flat.end_indices, strict=True)
    ]


async def vllm_prompt(request: GenerationRequest, codec: ChatCodec) -> Mapping[str, Any]:
    """vLLM's prompt: token ids with one placeholder per image, and the images with their hashes as cache keys."""
    prompt: dict[str, Any] = {"prompt_token_ids": codec.bare(request.prompt_ids).tolist()}
    if request.images:
        pictures = await asyncio.to_thread(lambda: [image.to_pil() for image in request.images])
        prompt["multi_modal_data"] = {"image": pictures}
        prompt["multi_modal_uuids"] = {"image": [image.sha256 for image in request.images]}
    return prompt
