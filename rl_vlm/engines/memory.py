"""The memory of one replica at its peak, by arithmetic from the model's shape, and what is left for keys and values."""

from __future__ import annotations

from rl_vlm.config import CommonConfig, PolicyConfig
from rl_vlm.config.serving import FILLED
from rl_vlm.engines.sizes import PREFILL_TOKENS, VLLM_RANKS, graph_sizes
from rl_vlm.models.families import family_of
from rl_vlm.models.memory.parts import CONTEXT, Part, frozen_tower, held_by_learner, published_bytes, total_of
from rl_vlm.models.memory.shape import ELEMENT, GIB, ModelShape, amount, gib

KV = "keys and values"
_VLLM_LOGITS, _OUR_LOGITS = 3, 8  # copies of float32 logits, while a token is drawn
_FREE_SHARE = 0.8  # of free memory that keys and values may take without a GPU
_MEAN = 0.25  # of serving.max_context: a running sample is half written on average, and most end before their limit
_GRAPH_LAYER = 200 << 10  # bytes of a decoder layer in one CUDA graph


def replica_parts(config: CommonConfig, shape: ModelShape, card: int | None) -> list[Part]:
    """The parts of one replica on one GPU of `card` bytes; None: the size is not known."""
    serving = config.serving
    if serving.expected_engine == "vllm":
        parts, size = _vllm(config, shape), vllm_kv(config, shape, card)
    else:
        parts, size = _transformers(config, shape), _rows(config) * sample_bytes(config, shape)
        if serving.max_kv_gib is not None:
            size = min(size, gib(serving.max_kv_gib))
    samples = size / sample_bytes(config, shape)
    tokens, mean = int(samples * serving.max_context), samples_at_once(config, shape, size)
    detail = f"{tokens} tokens, {samples:.1f} samples of {serving.max_context}, {mean} of mean length"
    return [*parts, Part(KV, size, detail)]


def samples_at_once(config: CommonConfig, shape: ModelShape, size: int) -> int:
    """Samples of mean length that one replica runs with `size` bytes for keys and values."""
    serving = config.serving
    most = serving.vllm.max_num_seqs if serving.expected_engine == "vllm" else serving.max_rows
    return min(size // sample_bytes(config, shape, _MEAN), most)


def _rows(config: CommonConfig) -> int:
    """Samples of a round that run on one replica with the transformers engine."""
    return min(config.serving.max_rows, max(1, config.samples_per_round // config.serving.num_replicas))


def sample_bytes(config: CommonConfig, shape: ModelShape, written: float = 1.0) -> int:
    """Keys, values and states of one sample of that part of `serving.max_context` on each of a replica's GPUs."""
    parallel = config.serving.vllm.tensor_parallel_size if config.serving.expected_engine == "vllm" else 1
    shares = min(parallel, shape.text.kv_heads)  # a head is never cut: more GPUs than key heads hold some twice
    tokens = int(written * config.serving.max_context)
    return tokens * shape.kv_bytes_per_token(ELEMENT[config.model.dtype]) // shares + shape.text.state // parallel


def _served_weights(config: CommonConfig, shape: ModelShape, parallel: int = 1) -> Part:
    element, quantization = ELEMENT[config.model.dtype], config.serving.quantization
    small = {"fp8": 1.0, "nf4": 0.5625}.get(quantization, element)  # bytes; NF4 with its scales
    linear = shape.text.linear_parameters
    size = (shape.parameters - linear) * element + linear * small
    precision = config.model.dtype if quantization == "none" else f"{config.model.dtype}, linear layers {quantization}"
    return Part("weights", int(size) // parallel, f"{amount(shape.parameters)} in {precision}")


def _vllm(config: CommonConfig, shape: ModelShape) -> list[Part]:
    settings, text, element = config.serving.vllm, shape.text, ELEMENT[config.model.dtype]
    tokens, parallel = settings.max_num_batched_tokens, settings.tensor_parallel_size
    parts = [_served_weights(config, shape, parallel), CONTEXT]
    if not config.trains_full:  # all linear layers of the language model, at a rank that vLLM has kernels for
        rank = next((rank for rank in VLLM_RANKS if rank >= config.max_lora_rank), config.max_lora_rank)
        size = config.lora_slots * shape.lora_parameters(rank, "all") * element // parallel
        parts.append(Part("adapters", size, f"{config.lora_slots} slots of rank {rank}"))
    logits = settings.max_num_seqs * text.vocab * 4 * _VLLM_LOGITS
    activations = tokens * (4 * text.hidden + 3 * text.width) * element + logits
    parts.append(Part("activations", activations, f"{tokens} tokens a step, {settings.max_num_seqs} samples' logits"))
    # At its start vLLM encodes a step's tokens of images or one image of the largest size, and keeps the features. The
    # language model has buffers for those of a step's deep stack.
    tower = shape.tower
    encoded, levels = max(tokens, _largest_image(config, shape)), len(tower.deepstack)
    kept = (encoded * (1 + levels) + tokens * levels) * text.hidden * element
    images = tower.pass_bytes(element, encoded * tower.merge**2) + kept
    parts.append(Part("images", images, f"{encoded} image tokens encoded, and as many kept"))
    if not settings.enforce_eager and config.serving.gpus_per_replica:
        # Of decoding and of mixed steps, and of each with adapters and without.
        graphs = 2 * len(graph_sizes(settings.max_num_seqs)) * (1 if config.trains_full else 2)
        parts.append(Part("CUDA graphs", graphs * text.layers * _GRAPH_LAYER, f"{graphs} graphs, an estimate"))
    return parts


def _largest_image(config: CommonConfig, shape: ModelShape) -> int:
    """Tokens of the largest image by `model.max_pixels`, else by the processor's limit."""
    if config.model.max_pixels is None:
        return family_of(shape.family).image_tokens
    return config.model.max_pixels // (shape.tower.patch * shape.tower.merge) ** 2


def vllm_kv(config: CommonConfig, shape: ModelShape, card: int | None) -> int:
    serving = config.serving
    if not serving.gpus_per_replica:
        return serving.vllm.kv_cache_gib * GIB
    if serving.vllm.gpu_kv_cache_gib is not None:
        return gib(serving.vllm.gpu_kv_cache_gib)
    if card is None:
        return sample_bytes(config, shape)  # the least
    if config.takes_turns:  # all that a learner leaves
        share = int(card * FILLED) - total_of(held_by_learner(config, shape))
    else:
        share = int(serving.memory_utilization * card)
    return max(share - total_of(_vllm(config, shape)), 0)


def _transformers(config: CommonConfig, shape: ModelShape) -> list[Part]:
    serving, text, element = config.serving, shape.text, ELEMENT[config.model.dtype]
    parts = [_served_weights(config, shape), CONTEXT]
    if config.trains_full:
        # Without a GPU they stay in the object store.
        size = shape.parameters * element * 2 if serving.gpus_per_replica else 0
        parts.append(Part("versions", size, "the newest weights, and the older ones of running samples"))
    elif isinstance(config, PolicyConfig) and serving.quantization == "none" and config.model.dtype == "float32":
        size = 2 * text.linear_parameters * element
        parts.append(Part("merged adapters", size, "the linear layers again, and once more while a version is made"))
    elif isinstance(config, PolicyConfig):  # computed beside the weights
        size = 2 * published_bytes(config, shape)
        parts.append(Part("adapters", size, "the newest, and the one that running samples finish with"))
    rows, prefill = _rows(config), PREFILL_TOKENS * (6 * text.hidden + 3 * text.width) * element
    size = prefill + rows * text.vocab * 4 * _OUR_LOGITS
    parts.append(Part("activations", size, f"{PREFILL_TOKENS} prompt tokens at a time, {rows} samples' logits"))
    return [*parts, frozen_tower(config, shape, element, serving.gpus_per_replica)]


def kv_cache_bytes(config: CommonConfig, shape: ModelShape, card: int) -> int | None:
    """What vLLM takes for keys and values on a GPU of `card` bytes; None: it measures what is free.

    On a shared card it would count what else is loaded meanwhile. Where no sample fits, vLLM rejects the number with a
    sentence of its own.
    """
    if config.serving.vllm.gpu_kv_cache_gib is None and not 0 < config.serving.gpus_per_replica < 1:
        return None
    return max(vllm_kv(config, shape, card), shape.kv_bytes_per_token(ELEMENT[config.model.dtype]))


def max_kv_tokens(config: CommonConfig, shape: ModelShape, card: int, free: int) -> int:
    """Tokens whose keys and values a replica with the transformers engine has memory for: one full context at least.

    card: bytes of its GPU, 0 without one; free: without a GPU, the replica's part of its machine's free memory.
    """
    serving = config.serving
    if serving.max_kv_gib is not None:
        size = gib(serving.max_kv_gib)
    elif card:
        size = int(serving.memory_utilization * card) - total_of(_transformers(config, shape))
    else:
        size = int(_FREE_SHARE * free)
    return max(size // shape.kv_bytes_per_token(ELEMENT[config.model.dtype]), serving.max_context)
