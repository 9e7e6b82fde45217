"""What a replica holds on each of its GPUs: weights, adapters, one step's activations, images, keys and values."""

from __future__ import annotations

from rl_vlm.config import CommonConfig, PolicyConfig
from rl_vlm.models.memory.learner import kept_between_updates
from rl_vlm.models.memory.parts import (
    CUDA_CONTEXT,
    ELEMENT,
    GIB,
    PREFILL_TOKENS,
    Part,
    amount,
    patches_at_once,
    text,
    tower_pass_bytes,
)
from rl_vlm.models.memory.shape import ModelShape

VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # of LoRA: what vLLM has kernels for
KV = "keys and values"
_FREE_SHARE = 0.8  # of free memory that keys and values may take without a GPU
_TAKEN = 0.92  # of a GPU on which replica and learner take turns: their other parts are estimates
_GRAPHS = int(0.6 * GIB)  # CUDA graphs of vLLM, with LoRA: an estimate
_LOGIT_COPIES = {
    "vllm": 3,
    "transformers": 8,
}  # of float32 [rows, vocabulary] while a token is drawn, by their samplers


def replica_parts(run: CommonConfig, shape: ModelShape, card: int | None) -> list[Part]:
    """The parts of one replica on one GPU of `card` bytes; None: the size is not known."""
    return _vllm(run, shape, card) if run.serving.expected_engine == "vllm" else _transformers(run, shape)


def kv_cache_bytes(run: CommonConfig, shape: ModelShape, card: int) -> int | None:
    """What vLLM is told to take for keys and values on a GPU of `card` bytes; None: it measures by itself.

    It measures device-wide free memory, so what else loads on a shared card at that moment would count as its own. Below one
    sample of `serving.max_context` the result is what is left all the same, and vLLM refuses it with a sentence of its own.
    """
    serving = run.serving
    if serving.vllm.gpu_kv_cache_gib is not None:
        return int(serving.vllm.gpu_kv_cache_gib * GIB)
    if not 0 < serving.gpus_per_replica < 1:
        return None
    used = sum(part.bytes for part in _vllm_fixed(run, shape))
    return max(_share(run, shape, card) - used, shape.kv_bytes_per_token(ELEMENT[run.model.dtype]))


def max_kv_tokens(run: CommonConfig, shape: ModelShape, card: int, free: int) -> int:
    """Tokens whose keys and values a replica with the transformers engine has memory for: one full context at least.

    card: bytes of its GPU, 0 without one; free: the replica's part of its machine's free memory, which counts without a GPU.
    """
    serving, per_token = run.serving, shape.kv_bytes_per_token(ELEMENT[run.model.dtype])
    if serving.max_kv_gib is not None:
        size = int(serving.max_kv_gib * GIB)
    elif card:
        other = sum(part.bytes for part in _transformers(run, shape) if part.name != KV)
        size = int(serving.memory_utilization * card) - other
    else:
        size = int(_FREE_SHARE * free)
    return max(size // per_token, serving.max_context)


def _share(run: CommonConfig, shape: ModelShape, card: int) -> int:
    """What a replica may take of a GPU of `card` bytes: its share, or all that a learner leaves between updates, which takes turns with it."""
    if isinstance(run, PolicyConfig) and run.serving.vllm.rest_while_learning:
        return int(card * _TAKEN) - kept_between_updates(run, shape)
    return int(run.serving.memory_utilization * card)


def starved_replica(run: CommonConfig, shape: ModelShape, card: int | None) -> str:
    """A sentence where vLLM's share of a GPU of `card` bytes leaves no room for one sample; empty where it does."""
    serving = run.serving
    if serving.expected_engine != "vllm" or card is None:
        return ""
    held = {part.name: part.bytes for part in _vllm(run, shape, card)}
    one = serving.max_context * _kv_bytes_per_token(run, shape)
    if held[KV] >= one:
        return ""
    if serving.vllm.rest_while_learning:
        return (
            f"The weights of replica and learner leave {text(held[KV])} of the GPU for keys and values, and one sample of "
            f"serving.max_context {serving.max_context} takes {text(one)}: use a larger GPU."
        )
    return (
        f"A replica's share of the GPU, {text(int(serving.memory_utilization * card))}, leaves {text(held[KV])} for keys and values, "
        f"and one sample of serving.max_context {serving.max_context} takes {text(one)}: raise serving.vllm.gpu_memory_utilization "
        f"({serving.memory_utilization:g}), or use a larger GPU."
    )


def vllm_lora_parameters(run: CommonConfig, shape: ModelShape) -> int:
    """Parameters that vLLM sets aside for adapters: all linear layers of the language model, at a rank that it has kernels for."""
    rank = next((rank for rank in VLLM_RANKS if rank >= run.max_lora_rank), run.max_lora_rank)
    return run.lora_slots * shape.lora_parameters(rank, "all")


def _weights(run: CommonConfig, shape: ModelShape, parallel: int = 1) -> Part:
    element, quantization = ELEMENT[run.model.dtype], run.serving.quantization
    small = {"fp8": 1.0, "nf4": 0.5625}.get(quantization)  # bytes; NF4 with its scales
    quantized = shape.text.linear_parameters if small is not None else 0
    size = (shape.parameters - quantized) * element + quantized * (small or 0)
    precision = run.model.dtype if small is None else f"{run.model.dtype}, linear layers {quantization}"
    shared = f", over {parallel} GPUs" if parallel > 1 else ""
    return Part("weights", int(size) // parallel, f"{amount(shape.parameters)} in {precision}{shared}")


def _vllm_adapters(run: CommonConfig, shape: ModelShape) -> Part:
    return Part(
        "adapters",
        vllm_lora_parameters(run, shape) * ELEMENT[run.model.dtype] // run.serving.vllm.tensor_parallel_size,
        f"{run.lora_slots} slots of rank {run.max_lora_rank}",
    )


def _vllm_fixed(run: CommonConfig, shape: ModelShape) -> list[Part]:
    serving, text_shape, element = run.serving, shape.text, ELEMENT[run.model.dtype]
    settings, parallel = serving.vllm, serving.vllm.tensor_parallel_size
    tokens = settings.max_num_batched_tokens
    widest = (
        3 * text_shape.token_width if not text_shape.experts else 3 * text_shape.token_width + 2 * text_shape.hidden
    )
    logits = settings.max_num_seqs * text_shape.vocab * 4 * _LOGIT_COPIES["vllm"]
    parts = [
        _weights(run, shape, parallel),
        *([] if run.trains_full else [_vllm_adapters(run, shape)]),
        Part(
            "activations",
            tokens * (4 * text_shape.hidden + widest) * element + logits,
            f"{tokens} tokens a step, {settings.max_num_seqs} samples' logits",
        ),
        # vLLM encodes at most a step's tokens of images, and keeps as many encoded ones.
        Part(
            "images",
            tower_pass_bytes(shape, element, tokens * shape.tower.merge**2)
            + tokens * text_shape.hidden * (1 + shape.tower.deepstack) * element,
            f"{tokens} image tokens encoded, and as many kept",
        ),
    ]
    if not settings.enforce_eager and serving.gpus_per_replica:
        parts.append(Part("CUDA graphs", _GRAPHS, "an estimate"))
    return [*parts, Part("CUDA context", CUDA_CONTEXT, "an estimate")]


def _kv_bytes_per_token(run: CommonConfig, shape: ModelShape) -> int:
    """Keys and values of one token on each of a replica's GPUs. A head is never cut: more GPUs than key heads hold some twice."""
    shares = min(run.serving.vllm.tensor_parallel_size, shape.text.kv_heads)
    return shape.kv_bytes_per_token(ELEMENT[run.model.dtype]) // shares


def _vllm(run: CommonConfig, shape: ModelShape, card: int | None) -> list[Part]:
    parts, serving = _vllm_fixed(run, shape), run.serving
    per_token = _kv_bytes_per_token(run, shape)
    if not serving.gpus_per_replica:
        size = serving.vllm.kv_cache_gib * GIB
    elif serving.vllm.gpu_kv_cache_gib is not None:
        size = int(serving.vllm.gpu_kv_cache_gib * GIB)
    elif card is not None:
        size = max(_share(run, shape, card) - sum(part.bytes for part in parts), 0)
    else:
        size = per_token * serving.max_context  # the least: one sample
    rows = size / (per_token * serving.max_context)
    return [*parts, Part(KV, size, f"{size // per_token} tokens, {rows:.1f} samples of {serving.max_context}")]


def _transformers(run: CommonConfig, shape: ModelShape) -> list[Part]:
    serving, text_shape, element = run.serving, shape.text, ELEMENT[run.model.dtype]
    rows = min(serving.max_rows, max(1, run.samples_per_round // serving.num_replicas))
    per_token = shape.kv_bytes_per_token(element)
    wide = PREFILL_TOKENS * (6 * text_shape.hidden + 3 * text_shape.token_width) * element
    parts = [_weights(run, shape)]
    if run.trains_full:
        # On a CPU they lie in the object store, once for all replicas of a node.
        versions = 2 * shape.parameters * element if serving.gpus_per_replica else 0
        parts.append(Part("versions", versions, "the newest weights, and those that running samples finish with"))
    elif not isinstance(run, PolicyConfig):
        pass  # it publishes no versions
    elif serving.quantization == "none" and run.model.dtype == "float32":
        merged = text_shape.linear_parameters * element
        parts.append(
            Part("merged adapters", 2 * merged, "the linear layers again, and once more while a version is made")
        )
    else:  # computed beside the weights
        factors = 4 * shape.lora_parameters(run.model.lora.rank, run.model.lora.target_modules)
        parts.append(
            Part("adapters", 2 * factors, "in float32: the newest, and the one that running samples finish with")
        )
    keys_and_values = rows * serving.max_context * per_token
    if serving.max_kv_gib is not None:
        keys_and_values = min(keys_and_values, int(serving.max_kv_gib * GIB))
    return [
        *parts,
        Part(
            "activations",
            wide + rows * text_shape.vocab * 4 * _LOGIT_COPIES["transformers"],
            f"{PREFILL_TOKENS} prompt tokens at a time, {rows} samples' logits",
        ),
        Part(
            "images",
            run.model.image_cache_bytes + tower_pass_bytes(shape, element, patches_at_once(serving.gpus_per_replica)),
            f"features up to {run.model.image_cache_mib} MiB, and a pass of the tower",
        ),
        Part(
            KV,
            keys_and_values,
            f"{rows} samples of {serving.max_context} at most, {text(serving.max_context * per_token)} each",
        ),
        Part("CUDA context", CUDA_CONTEXT, "an estimate"),
    ]
