"""How vLLM is started: its environment variables, its engine arguments, and the process that it computes in."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

from rl_vlm.config import CommonConfig, ServingSection
from rl_vlm.engines.memory import kv_cache_bytes
from rl_vlm.engines.sizes import VLLM_RANKS, graph_sizes
from rl_vlm.models.devices import replica_on_gpu
from rl_vlm.models.families import family_of
from rl_vlm.models.images import TextSide
from rl_vlm.models.memory.reading import read_shape
from rl_vlm.models.modules import keeps_states
from rl_vlm.types import UserInputError

NO_VERSION = "default"  # vLLM's name of its weights before they get another
DEAD = "vLLM's engine core has died, its log says why: restart the replica."


def prepare_environment(serving: ServingSection) -> None:
    """Set what vLLM reads from the environment, before its first import. Raises UserInputError without vLLM, and where
    it is built for a GPU that this replica has not."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("DO_NOT_TRACK", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is a folder
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"  # this process has threads: forking it is not safe
    on_gpu = replica_on_gpu(serving)
    if not on_gpu:
        os.environ["VLLM_PLUGINS"] = ""
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(serving.vllm.kv_cache_gib)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # binding collapses when replicas share cores
        # AsyncLLM has an engine core process either way; with 1, vLLM puts a worker process below it on a CPU.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        from vllm.platforms import current_platform
    except ImportError as error:
        raise UserInputError(
            f"Engine vllm needs the package vllm, which does not import here ({error}): pip install -r "
            "requirements/gpu.txt, or requirements/cpu.txt on a machine without a GPU."
        ) from error
    if not on_gpu and not current_platform.is_cpu():
        raise UserInputError(
            "The vLLM that is installed computes on GPUs alone, and this replica has none: set "
            "serving.gpus_per_replica=1, or serving.engine=transformers."
        )


def engine_args(model: Path, config: CommonConfig, text: TextSide) -> Any:
    """vLLM's AsyncEngineArgs. Raises UserInputError for what vLLM does not have."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from rl_vlm.engines.vllm_worker import SUPPRESSED_KEY

    serving, settings, on_gpu = config.serving, config.serving.vllm, replica_on_gpu(config.serving)
    eager = settings.enforce_eager or not on_gpu
    if serving.quantization == "nf4":
        raise UserInputError("vLLM has no NF4: set serving.engine to transformers, or serving.quantization to fp8.")
    if not on_gpu and serving.quantization == "fp8":
        raise UserInputError("serving.quantization fp8 needs a GPU, and this replica has none: leave it out.")
    versions: dict[str, Any] = {"worker_extension_cls": "rl_vlm.engines.vllm_worker.WeightsWorker"}
    if not config.trains_full:
        rank = next((rank for rank in VLLM_RANKS if rank >= config.max_lora_rank), None)
        if rank is None:
            raise UserInputError(f"vLLM serves LoRA up to rank {VLLM_RANKS[-1]}: lower model.lora.rank.")
        slots = config.lora_slots
        versions |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": slots, "max_cpu_loras": slots + 2}
    return AsyncEngineArgs(
        model=str(model),
        dtype=config.model.dtype,
        hf_overrides={"head_dtype": config.model.head_dtype},  # where vLLM looks for it
        max_model_len=serving.max_context,
        max_num_seqs=settings.max_num_seqs,
        gpu_memory_utilization=serving.memory_utilization,
        kv_cache_memory_bytes=kv_cache_bytes(config, read_shape(model), _card_bytes()) if on_gpu else None,
        enable_sleep_mode=config.takes_turns and on_gpu,
        tensor_parallel_size=settings.tensor_parallel_size,
        # Inside a Ray actor vLLM would otherwise choose Ray for several GPUs.
        distributed_executor_backend="uni" if settings.tensor_parallel_size == 1 else "mp",
        enforce_eager=eager,
        cudagraph_capture_sizes=None if eager else graph_sizes(settings.max_num_seqs),
        attention_backend=_attention(config.model.dtype),
        gdn_prefill_backend="triton",  # of Qwen3.5; vLLM's own choice on newer GPUs is FlashInfer, see _attention
        # On a CPU a seeded request whose prefill is cut in two ends vLLM's engine core. So prompts are never cut there,
        # and the budget holds many of them with their images.
        enable_chunked_prefill=on_gpu,
        max_num_batched_tokens=settings.max_num_batched_tokens if on_gpu else max(16384, serving.max_context),
        model_impl=family_of(json.loads((model / "config.json").read_text())["model_type"]).vllm,
        enable_prefix_caching=on_gpu or not keeps_states(model),  # states are shared only where prompts are cut
        quantization="fp8_per_tensor" if serving.quantization == "fp8" else None,  # done while loading
        **versions,
        limit_mm_per_prompt={"video": 0},
        # The same limits as our own token counts.
        mm_processor_kwargs={"images_kwargs": {"size": text.images.size}} if text.images.size else {},
        mm_processor_cache_gb=4 if on_gpu else 0.5,  # GiB of the machine's own memory, for the pixels of past images
        structured_outputs_config={"backend": "guidance"},  # type: ignore[arg-type]  # as the other engine
        generation_config="vllm",  # nothing from the model's generation_config.json
        logprobs_mode="processed_logprobs",  # after mask, temperature, top-k and top-p
        logits_processors=["rl_vlm.engines.vllm_worker:TokenMask"],
        additional_config={SUPPRESSED_KEY: text.codec.suppressed_token_ids(text.vocab_size).tolist()},
        # Requests without seeds must differ between replicas and restarts.
        seed=int.from_bytes(os.urandom(4), "little") >> 1,
        use_tqdm_on_load=False,
        disable_log_stats=True,
        enable_log_requests=False,
        trust_remote_code=False,
    )


def _attention(dtype: str) -> str | None:
    """The attention kernels, where vLLM's own choice (None) would not do. On a B200 it is FlashInfer, which compiles
    them with nvcc or downloads them, and a machine need have neither nvcc nor a network."""
    from vllm.platforms import current_platform

    return "FLASH_ATTN" if dtype != "float32" and current_platform.is_device_capability_family(100) else None


def _card_bytes() -> int:
    """Memory of this process' GPU, as the driver says: torch would create a CUDA context, which stays."""
    from vllm.platforms import current_platform

    return int(current_platform.get_device_total_memory())


def start_llm(args: Any, num_threads: int, counts: Counter[str]) -> Any:
    """An AsyncLLM that adds the `steps` that brought a token and `generated_tokens` to `counts`, and notes the
    `policy_version` of the last tokens. The engine core ends with the thread that calls this."""
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    from rl_vlm.engines.vllm_worker import executor_class

    config = args.create_engine_config(UsageContext.ENGINE_CONTEXT)
    executor = executor_class(args.tensor_parallel_size)
    # Of the engine core alone. vLLM repeats few batch sizes: oneDNN's own capacities help here, unlike in a learner.
    variables = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1024", "LRU_CACHE_CAPACITY": "1024"}
    if config.device_config.device_type == "cpu":
        # torch.compile would keep the first sample waiting for 17 s, and needs a C++ compiler.
        variables |= {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": str(num_threads)}
    with mock.patch.dict(os.environ, variables):
        llm = AsyncLLM(vllm_config=config, executor_class=executor, log_stats=False, log_requests=False)
    receive = llm.engine_core.get_output_async

    async def receive_and_count() -> Any:
        # The AsyncLLM reports a sample only when it ends, which may take minutes.
        step = await receive()
        counts["steps"] += 1
        counts["generated_tokens"] += sum(len(output.new_token_ids) for output in step.outputs)
        if step.weight_version not in (None, NO_VERSION):
            counts["policy_version"] = int(step.weight_version)
        return step

    llm.engine_core.get_output_async = receive_and_count  # type: ignore[method-assign]
    return llm
