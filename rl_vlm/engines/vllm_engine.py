"""The vLLM engine: vLLM's AsyncLLM on an event loop of its own, one LoRA adapter per policy version.

vLLM computes in a child process, the engine core. What this process does for it (prompts, images, stop strings) runs
on a thread with its own event loop, so the caller's loop stays free and may be any loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from rl_vlm.chat import expand_image_tokens
from rl_vlm.config import ServingSection
from rl_vlm.engines.base import BASE_MODEL, EngineError
from rl_vlm.models.loading import TextSide, load_text_side, quiet_libraries
from rl_vlm.models.lora import AdapterPayload
from rl_vlm.types import Completion, EncodedImage, GenerationRequest, Sample, SamplingParams, StopReason, UserInputError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # what vLLM has kernels for
_FOLDER_PREFIX = "rl-vlm-adapters-"
_KEPT_FOLDERS = 2  # adapter folders that stay although no request uses them
_SHUTDOWN_S = 2.0  # how long the engine core may take to end by itself
# vLLM silently raises lower temperatures to 0.01 and refuses higher ones.
_MIN_TEMPERATURE, _MAX_TEMPERATURE = 0.01, 2.0
_SEED_MASK = 2**63 - 1


@dataclass(slots=True)
class _Adapter:
    """One loaded version: `request` is vLLM's LoRARequest, `users` the requests that are running with it."""

    version: int
    sha256: str
    folder: Path
    request: Any
    users: int = 0


class VLLMEngine:
    """Serves a model folder with vLLM. The weights are loaded when the constructor returns.

    Args:
        model: the model folder.
        dtype: of the weights and the adapters.
        serving: `max_context` and the `vllm` section; `num_threads` on a machine without a GPU.
        max_lora_rank: the highest rank of an adapter, rounded up to what vLLM knows (8, 16, 32, 64, ...).
        max_loras: versions that may sample at the same time; requests of a further one wait for the oldest to finish.
    """

    def __init__(
        self, model: Path, *, dtype: str, serving: ServingSection, max_lora_rank: int = 64, max_loras: int = 2
    ) -> None:
        quiet_libraries()
        _prepare_environment(serving)
        try:
            import vllm  # noqa: F401 - before the child's environment is set: the parent must not read that
        except ImportError as error:
            raise UserInputError(
                f"Engine vllm needs the package vllm, which does not import here ({error}): pip install -r "
                "requirements/gpu.txt, or requirements/cpu.txt on a machine without a GPU."
            ) from error
        self._text: TextSide = load_text_side(model)
        self._max_context = serving.max_context
        self._adapters: list[_Adapter] = []  # oldest first
        self._seen: dict[int, str] = {}  # version -> SHA-256
        self._closed = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._loop = asyncio.new_event_loop()
        self._adapter_lock = asyncio.Lock()
        started: Future[Any] = Future()
        self._thread = threading.Thread(
            target=self._run,
            args=(_engine_args(model, dtype, serving, max_lora_rank, max_loras, self._text), started),
            name="vllm-engine",
            daemon=True,
        )
        self._thread.start()
        try:
            self._llm: Any = started.result()
        except Exception as error:  # noqa: BLE001 - vLLM raises many types; all mean that it did not start
            first_line = (str(error) or repr(error)).strip().splitlines()[0]
            raise EngineError(f"vLLM did not start: {first_line}") from error
        self._folders, self._folders_lock = _claim_adapter_root()

    @property
    def version(self) -> int:
        """The newest adapter version that is loaded."""
        return self._adapters[-1].version if self._adapters else 0

    @property
    def dead(self) -> bool:
        """Whether vLLM's engine core has died; only a new engine helps."""
        return bool(not self._closed and self._llm.errored)

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        """Answer all requests, in order. Cancelling the call aborts them in vLLM.

        vLLM starts a request when it has room, without telling: `queue_s` is 0 and `generate_s` counts both.
        """
        return await self._call(self._generate(list(requests))) if requests else []

    async def load_adapter(self, payload: AdapterPayload) -> None:
        """Serve a version to every request that starts from now on."""
        await self._call(self._load(payload))

    async def close(self) -> None:
        """End vLLM and delete the adapter files; calls that wait get an EngineError."""
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop)
        await asyncio.to_thread(self._llm.shutdown, _SHUTDOWN_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join, 10.0)
        shutil.rmtree(self._folders, ignore_errors=True)
        os.close(self._folders_lock)

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the engine's loop and wait for it on the caller's."""
        if self._closed:
            work.close()
            raise EngineError("The engine is closed.")
        try:
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._tracked(work), self._loop))
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed and not (task and task.cancelling()):
                raise EngineError("The engine is closed.") from None
            raise

    # What follows runs on the engine's thread.

    def _run(self, args: Any, started: Future[Any]) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            started.set_result(self._loop.run_until_complete(_start(args)))
        except BaseException as error:  # noqa: BLE001 - the constructor waits for it and raises it
            started.set_exception(error)
        else:
            self._loop.run_forever()
        finally:
            with contextlib.suppress(RuntimeError):
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
        from vllm.lora.request import LoRARequest

        async with self._adapter_lock:
            payload.verify()
            known = self._seen.get(payload.version)
            if known is not None:
                if known == payload.sha256 and payload.version == self.version:
                    return
                raise EngineError(
                    f"Adapter version {payload.version} was loaded before: publish other weights under a new version."
                )
            _check_modules(payload)
            # A new id, name and path per version: vLLM keeps the old weights of an id that it knows, and its prefix
            # cache tells versions apart by the name.
            name = f"policy-v{payload.version}"
            folder = await asyncio.to_thread(payload.write, self._folders / name)
            request = LoRARequest(name, len(self._seen) + 1, str(folder))
            try:
                await self._llm.add_lora(request)
            except Exception as error:  # noqa: BLE001 - vLLM passes the child's error on as a plain Exception
                shutil.rmtree(folder, ignore_errors=True)
                if self._llm.errored:
                    raise EngineError(_DEAD) from error
                raise EngineError(f"vLLM refused adapter version {payload.version}: {error}") from error
            self._seen[payload.version] = payload.sha256
            self._adapters.append(_Adapter(payload.version, payload.sha256, folder, request))
            # vLLM reads a folder again when it has dropped an adapter that a running request still needs.
            for adapter in [a for a in self._adapters[:-_KEPT_FOLDERS] if not a.users]:
                self._adapters.remove(adapter)
                await asyncio.to_thread(shutil.rmtree, adapter.folder, True)

    @contextlib.contextmanager
    def _lease(self, request: GenerationRequest) -> Iterator[tuple[int, Any]]:
        """(version, LoRARequest or None) for the whole of one request."""
        if request.min_version == BASE_MODEL or not self._adapters:
            yield (BASE_MODEL if request.min_version == BASE_MODEL else 0), None
            return
        adapter = self._adapters[-1]
        adapter.users += 1
        try:
            yield adapter.version, adapter.request
        finally:
            adapter.users -= 1

    async def _generate(self, requests: list[GenerationRequest]) -> list[Completion]:
        return await _all_or_none([self._complete(request) for request in requests])

    async def _complete(self, request: GenerationRequest) -> Completion:
        started = time.monotonic()
        expanded = self._expand(request)
        images = await asyncio.to_thread(_decode, request.images) if request.images else []
        prompt: dict[str, Any] = {"prompt_token_ids": request.prompt_ids.tolist()}
        if images:
            prompt["multi_modal_data"] = {"image": images}
            prompt["multi_modal_uuids"] = {"image": [image.sha256 for image in request.images]}
        with self._lease(request) as (version, lora):
            # One vLLM request per sample, so that each has its own seed; the prefix cache shares the prompt.
            samples = await _all_or_none(
                [self._sample(request, k, prompt, expanded, lora) for k in range(request.sampling.n)]
            )
        return Completion(
            request_id=request.request_id,
            prompt_ids=expanded,
            samples=tuple(samples),
            policy_version=version,
            generate_s=time.monotonic() - started,
        )

    def _expand(self, request: GenerationRequest) -> np.ndarray:
        """int32 prompt ids with every image placeholder expanded; raises EngineError for what cannot be sampled."""
        sampling = request.sampling
        try:
            counts = [self._text.count_image_tokens(image.width, image.height) for image in request.images]
            image_token_id = self._text.codec.image_token_id
            ids = expand_image_tokens(request.prompt_ids, image_token_id, counts, request.request_id)
        except UserInputError as error:
            raise EngineError(f"Request {request.request_id}: {error}") from error
        if len(ids) + sampling.max_new_tokens > self._max_context:
            raise EngineError(
                f"Request {request.request_id}: {len(ids)} prompt tokens and {sampling.max_new_tokens} new ones exceed "
                f"the context of {self._max_context}: raise serving.max_context or send less."
            )
        if sampling.temperature and not _MIN_TEMPERATURE <= sampling.temperature <= _MAX_TEMPERATURE:
            raise EngineError(
                f"Request {request.request_id}: vLLM samples at temperature 0 or at {_MIN_TEMPERATURE} to "
                f"{_MAX_TEMPERATURE}, not at {sampling.temperature}."
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
                # vLLM forgot an image that this process believed it had; the second try sends it again.
                output = await self._run_request(f"{name}/{number}", prompt, params, lora)
        except (VLLMError, ValueError) as error:
            if self._llm.errored:
                raise EngineError(_DEAD) from error
            raise EngineError(f"Request {name}: vLLM could not answer ({error.__cause__ or error}).") from error
        if not np.array_equal(np.asarray(output.prompt_token_ids), expanded):
            raise EngineError(
                f"Request {name}: vLLM expanded the prompt to {len(output.prompt_token_ids)} tokens, the image "
                f"processor's grid to {len(expanded)}: the model folder's processor config does not fit."
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
            ignore_eos=True,  # the end of a turn is ours to define, not the generation config's
            logprobs=0,  # of the sampled token
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
            reason = StopReason.END_OF_TURN
        else:
            reason = StopReason.STOP if output.finish_reason == "stop" else StopReason.LENGTH
        return Sample(tokens, logprobs, reason)


_DEAD = "vLLM's engine core has died, its log says why: the replica must be restarted."


async def _start(args: Any) -> Any:
    """An AsyncLLM whose weights are loaded; blocks the loop meanwhile."""
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    from rl_vlm.engines.vllm_worker import bound_executor

    config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    with _child_environment():
        return AsyncLLM(
            vllm_config=config,
            executor_class=bound_executor(args.tensor_parallel_size),
            log_stats=False,
            log_requests=False,
        )


def _engine_args(
    model: Path, dtype: str, serving: ServingSection, max_lora_rank: int, max_loras: int, text: TextSide
) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from rl_vlm.engines.vllm_worker import SUPPRESSED_KEY

    if max_lora_rank > _RANKS[-1]:
        raise UserInputError(f"vLLM serves LoRA up to rank {_RANKS[-1]}, not {max_lora_rank}: lower model.lora.rank.")
    settings = serving.vllm
    return AsyncEngineArgs(
        model=str(model),
        dtype=dtype,  # type: ignore[arg-type]
        max_model_len=serving.max_context,
        max_num_seqs=settings.max_num_seqs,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        tensor_parallel_size=settings.tensor_parallel_size,
        # Inside a Ray actor vLLM would otherwise choose Ray for several GPUs.
        distributed_executor_backend="uni" if settings.tensor_parallel_size == 1 else "mp",
        enforce_eager=settings.enforce_eager or not torch.cuda.is_available(),
        enable_prefix_caching=True,
        enable_lora=True,
        max_lora_rank=next(rank for rank in _RANKS if rank >= max_lora_rank),
        max_loras=max_loras,
        max_cpu_loras=max_loras + 2,
        limit_mm_per_prompt={"video": 0},
        generation_config="vllm",  # nothing from the model's generation_config.json
        logprobs_mode="processed_logprobs",  # after mask, temperature, top-k and top-p
        logits_processors=["rl_vlm.engines.vllm_worker:TokenMask"],
        additional_config={SUPPRESSED_KEY: text.codec.suppressed_token_ids(text.vocab_size).tolist()},
        # Requests without seeds must differ between replicas and restarts.
        seed=int.from_bytes(os.urandom(4), "little") >> 1,
        disable_log_stats=True,
        enable_log_requests=False,
        trust_remote_code=False,
    )


def _prepare_environment(serving: ServingSection) -> None:
    """Set what vLLM reads from the environment, before its first import."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is a folder
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # this process has threads: forking it is not safe
    if not torch.cuda.is_available():
        os.environ["VLLM_PLUGINS"] = ""
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(serving.vllm.kv_cache_gib)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # binding collapses when replicas share cores
        os.environ["OMP_NUM_THREADS"] = str(serving.num_threads)
        # AsyncLLM has an engine core process either way; with 1, vLLM puts a worker process below it on a CPU.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


@contextlib.contextmanager
def _child_environment() -> Iterator[None]:
    """What only the child may see: without a GPU, its first sample would wait 17 s for torch.compile and need g++."""
    if torch.cuda.is_available():
        yield
        return
    before = os.environ.get("TORCHDYNAMO_DISABLE")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TORCHDYNAMO_DISABLE"]
        else:
            os.environ["TORCHDYNAMO_DISABLE"] = before


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


def _check_modules(payload: AdapterPayload) -> None:
    """vLLM would silently ignore an adapted vision tower."""
    strangers = [name for name in payload.state() if "language_model" not in name]
    if strangers:
        raise EngineError(
            f"Adapter version {payload.version} adapts {strangers[0]}: only the language model's layers can be adapted."
        )


def _claim_adapter_root() -> tuple[Path, int]:
    """A new folder for this engine's adapters, in memory where possible, and the descriptor that locks it.

    Folders whose owner was killed are deleted: their lock is free.
    """
    memory = Path("/dev/shm")
    base = memory if os.access(memory, os.W_OK) else Path(tempfile.gettempdir())
    for stale in base.glob(f"{_FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(stale, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(stale, ignore_errors=True)
            finally:
                os.close(descriptor)
    # Locked under a name that nobody sweeps, then renamed.
    draft = Path(tempfile.mkdtemp(prefix=f".{_FOLDER_PREFIX}", dir=base))
    descriptor = os.open(draft, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return draft.rename(draft.with_name(draft.name[1:])), descriptor
