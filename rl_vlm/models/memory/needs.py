"""Bytes that a learner and a replica need at their peak."""

from __future__ import annotations

from rl_vlm.config import CommonConfig, PolicyConfig
from rl_vlm.models.memory.shape import (
    CUDA_CONTEXT,
    ELEMENT,
    GIB,
    HEAD_TILES,
    PREFILL_TOKENS,
    ModelShape,
    Part,
    amount,
    patches_at_once,
    text,
    tower_pass_bytes,
)

_HEAD_COPIES = 4  # float32 arrays of a tile's shape at the peak
_LORA = 4  # bytes of a LoRA weight, its gradient and each of its moments: float32
OF_UPDATES = ("activations", "attention mask", "logits")  # parts that only an update needs
_GATHERED = 2  # layers of a sharded model that are whole at once: the one that computes, and the next
_PREFERENCE = 1 * GIB  # agent, critics and the reward ensemble with its batches: an upper bound for the published sizes


def layer_bytes_per_token(shape: ModelShape, element: int, rank: int, target_modules: str, lora: int = _LORA) -> int:
    """What one decoder layer keeps for its backward pass, per token, without the attention mask.

    `element`: bytes of the model's precision; `lora`: of the precision that LoRA layers compute in. Attention keeps
    what a flash kernel does: queries, keys, values and its output. Equals a count of what autograd saves on the meta
    device.
    """
    text = shape.text
    queries, keys = text.heads * text.head_dim, text.kv_heads * text.head_dim
    norms = 2 * (text.hidden + 1) + text.head_norms * (queries + keys + text.heads + text.kv_heads)
    attention = 2 * queries + 2 * keys
    mlp = 3 * text.width  # gate, its activation, up: their product and the frozen projections keep nothing
    adapted = [linear for linear in shape.adapted(target_modules) if linear in list(text.linears()) and linear.copies]
    if lora != element:  # every LoRA layer keeps a copy of its input in its own precision
        inputs = lora * sum(linear.inputs for linear in adapted)
    else:  # shared where layers have the same input; the attention's output is kept already
        names = {linear.name for linear in adapted}
        shared = [names & {"q_proj", "k_proj", "v_proj"}, names & {"gate_proj", "up_proj"}]
        inputs = element * (sum(map(bool, shared)) * text.hidden + ("down_proj" in names) * text.width)
    return 4 * norms + element * (attention + mlp) + inputs + lora * rank * len(adapted)


def full_layer_bytes_per_token(shape: ModelShape, element: int) -> int:
    """As `layer_bytes_per_token` where all weights are trained: linear layers keep their inputs, norms what they
    scale."""
    text = shape.text
    scaled = 2 * text.hidden + text.head_norms * (text.heads + text.kv_heads) * text.head_dim
    return layer_bytes_per_token(shape, element, 0, "all", lora=element) + element * scaled


def learner_parts(config: PolicyConfig, shape: ModelShape) -> list[Part]:
    """The parts of one learner of a policy run."""
    model, element = config.model, ELEMENT[config.model.dtype]
    return [
        _learner_weights(config, shape, element),
        *(_trained_whole(config, shape, element) if model.train == "full" else [_trained_lora(config, shape)]),
        _activations(config, shape, element),
        _mask(config, shape, element),
        _logits(config, shape, element),
        _images(config, shape, element),
        Part("CUDA context", CUDA_CONTEXT, "an estimate"),
    ]


def kept_between_updates(config: PolicyConfig, shape: ModelShape) -> int:
    """Bytes that one learner of a policy run holds while it waits."""
    return sum(part.bytes for part in learner_parts(config, shape) if part.name not in OF_UPDATES)


def _trained_whole(config: PolicyConfig, shape: ModelShape, element: int) -> list[Part]:
    learner, count = config.learner, shape.parameters
    moments = 2 if learner.optimizer == "adamw" else 0.1
    # Masters are the weights themselves where these are float32; else a parameter's own gradient is freed as soon as it
    # is added.
    masters = 0 if element == 4 else 1
    largest = shape.text.embedding * element if masters else 0
    averages = int(learner.ema_decay is not None)
    head = _head_parameters(config, shape) * 4 * (2 + moments)
    parts = [
        Part(
            "masters and optimiser",
            int(count * 4 * (masters + 1 + moments + averages) + largest + head),
            f"{amount(count)} in float32: {'masters, ' if masters else ''}gradients, {learner.optimizer}",
        )
    ]
    if config.algorithm.has_reference:
        parts.append(Part("reference", count * element, f"the base model in {config.model.dtype}, for the KL penalty"))
    return parts


def _head_parameters(config: PolicyConfig, shape: ModelShape) -> int:
    """The number of parameters of the critic's head."""
    if config.critic is None:
        return 0
    width = config.critic.hidden
    return (shape.text.hidden + 1) * width + width + 1 if width else shape.text.hidden + 1


def _trained_lora(config: PolicyConfig, shape: ModelShape) -> Part:
    learner, lora = config.learner, config.model.lora
    adapter = shape.lora_parameters(lora.rank, lora.target_modules)
    trained = adapter + _head_parameters(config, shape)
    if config.critic is not None:
        trained += adapter if config.critic.kind == "adapter" else 0
    moments = 2 if learner.optimizer == "adamw" else 0.1  # adafactor keeps sums over rows and columns
    kept = adapter if learner.ema_decay is not None else 0
    return Part(
        "LoRA and optimiser",
        int(trained * _LORA * (2 + moments) + kept * _LORA),
        f"{amount(trained)} in float32: weights, gradients, {learner.optimizer}",
    )


def _learner_weights(config: PolicyConfig, shape: ModelShape, element: int) -> Part:
    learner, layers = config.learner, shape.text.parameters
    if not learner.shards_layers:
        return Part("weights", shape.parameters * element, f"{amount(shape.parameters)} in {config.model.dtype}")
    whole = shape.parameters - layers
    gathered = _GATHERED * layers // shape.text.layers
    shard = 0 if learner.offload_params else layers // max(learner.num_learners, 1)
    where = "host memory" if learner.offload_params else f"{learner.num_learners} shards"
    return Part(
        "weights",
        (whole + gathered + shard) * element,
        f"{amount(layers)} in {where}, {_GATHERED} layers of them gathered, and {amount(whole)} whole, in "
        f"{config.model.dtype}",
    )


def _tokens(config: PolicyConfig) -> int:
    # A row that is longer than a micro-batch goes alone.
    return max(config.learner.micro_batch_tokens, config.serving.max_context)


def _activations(config: PolicyConfig, shape: ModelShape, element: int) -> Part:
    text, lora, tokens = shape.text, config.model.lora, _tokens(config)
    if config.model.train == "full":
        layer, working = full_layer_bytes_per_token(shape, element), 3 * text.width * element
    else:
        layer = layer_bytes_per_token(shape, element, lora.rank, lora.target_modules)
        # At its widest a layer holds the product of a linear layer, its LoRA's in float32 twice, and their sum.
        working = text.width * (element + 3 * _LORA)
    inputs = element * text.hidden
    if config.learner.gradient_checkpointing:
        per_token = inputs * (text.layers + 2) + layer + working
        detail = f"{tokens} tokens × {text.layers} layers' inputs, and one layer computed again"
    else:
        per_token = layer * text.layers + 2 * inputs + working
        detail = f"{tokens} tokens × {text.layers} layers, no checkpointing"
    return Part("activations", tokens * per_token, detail)


def _logits(config: PolicyConfig, shape: ModelShape, element: int) -> Part:
    rows, columns = HEAD_TILES["cuda" if config.learner.gpus_per_learner else "cpu"]
    rows, columns = min(rows, _tokens(config)), min(columns, shape.text.vocab)
    # Beside a tile: the slope of each log-probability, which the backward pass scales, and the sum that it grows from.
    slopes = 2 * 4 * _tokens(config) * shape.text.hidden
    # The head's own gradient is collected in float32.
    of_head = 4 * shape.text.embedding if config.model.train == "full" else 0
    return Part(
        "logits",
        rows * columns * (element + 4 * _HEAD_COPIES) + slopes + of_head,
        f"{rows} × {columns} at a time, and slopes",
    )


def _mask(config: PolicyConfig, shape: ModelShape, element: int) -> Part:
    tokens, longest = _tokens(config), config.serving.max_context
    # As numbers that are added to the scores, by each layer for its backward pass.
    layers = 1 if config.learner.gradient_checkpointing else shape.text.layers
    if (
        config.learner.attention != "dense"
    ):  # a continuation sees at most a context; auto takes a dense mask where that is less
        # Query heads that share a key head have a mask of their own each: see `masked_attention`.
        groups = shape.text.heads // shape.text.kv_heads
        size = longest**2 + groups * tokens * longest * element * layers
        return Part("attention mask", size, f"{tokens} tokens, each beside {longest} at most")
    # A packed row, a prompt with all its continuations, may be as long as a micro-batch; bytes while its mask is made.
    length = tokens if config.learner.share_prompts else longest
    return Part("attention mask", length**2 * (4 + element * layers), f"{length}² of one row")


def _images(config: PolicyConfig, shape: ModelShape, element: int) -> Part:
    whole = config.model.train == "full"
    if not whole and config.model.lora.target_modules != "vision":
        at_once = patches_at_once(config.learner.gpus_per_learner)
        detail = f"features up to {config.model.image_cache_mib} MiB, {at_once} patches at a time"
        return Part("images", config.model.image_cache_bytes + tower_pass_bytes(shape, element, at_once), detail)
    # A tower that is trained keeps its layers' activations of all images of a micro-batch, whose tokens are at most
    # all.
    tower, patches = shape.tower, _tokens(config) * shape.tower.merge**2
    inputs = sum(linear.inputs * linear.copies for linear in tower.linears()) * (element if whole else _LORA)
    kept = inputs + tower.depth * (element * (4 * tower.hidden + 2 * tower.width) + 8 * tower.hidden)
    if whole and config.learner.gradient_checkpointing:
        kept = element * tower.hidden * tower.depth + kept // tower.depth
    return Part("images", patches * kept, f"{patches} patches at most, with a gradient")


def preference_learner_parts() -> list[Part]:
    """The parts of a learner of a preference run."""
    return [
        Part("agent and reward models", _PREFERENCE, "an upper bound"),
        Part("CUDA context", CUDA_CONTEXT, "an estimate"),
    ]


# What a replica holds on each of its GPUs: weights, adapters, one step's activations, images, keys and values.

VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # of LoRA: what vLLM has kernels for
KV = "keys and values"
_FREE_SHARE = 0.8  # of free memory that keys and values may take without a GPU
_TAKEN = 0.92  # of a GPU on which replica and learner take turns: their other parts are estimates
_GRAPHS = int(0.6 * GIB)  # CUDA graphs of vLLM, with LoRA: an estimate
_LOGIT_COPIES = {
    "vllm": 3,
    "transformers": 8,
}  # of float32 [rows, vocabulary] while a token is drawn, by their samplers


def replica_parts(config: CommonConfig, shape: ModelShape, card: int | None) -> list[Part]:
    """The parts of one replica on one GPU of `card` bytes; None: the size is not known."""
    return _vllm(config, shape, card) if config.serving.expected_engine == "vllm" else _transformers(config, shape)


def kv_cache_bytes(config: CommonConfig, shape: ModelShape, card: int) -> int | None:
    """What vLLM is told to take for keys and values on a GPU of `card` bytes; None: it measures by itself.

    It measures device-wide free memory, so what else loads on a shared card at that moment would count as its own.
    Below one sample of `serving.max_context` the result is what is left, and vLLM rejects it with a
    sentence of its own.
    """
    serving = config.serving
    if serving.vllm.gpu_kv_cache_gib is not None:
        return int(serving.vllm.gpu_kv_cache_gib * GIB)
    if not 0 < serving.gpus_per_replica < 1:
        return None
    used = sum(part.bytes for part in _vllm_fixed(config, shape))
    return max(_share(config, shape, card) - used, shape.kv_bytes_per_token(ELEMENT[config.model.dtype]))


def max_kv_tokens(config: CommonConfig, shape: ModelShape, card: int, free: int) -> int:
    """Tokens whose keys and values a replica with the transformers engine has memory for: one full context at least.

    card: bytes of its GPU, 0 without one; free: the replica's part of its machine's free memory, which counts without a
    GPU.
    """
    serving, per_token = config.serving, shape.kv_bytes_per_token(ELEMENT[config.model.dtype])
    if serving.max_kv_gib is not None:
        size = int(serving.max_kv_gib * GIB)
    elif card:
        other = sum(part.bytes for part in _transformers(config, shape) if part.name != KV)
        size = int(serving.memory_utilization * card) - other
    else:
        size = int(_FREE_SHARE * free)
    return max(size // per_token, serving.max_context)


def _share(config: CommonConfig, shape: ModelShape, card: int) -> int:
    """What a replica may take of a GPU of `card` bytes: its share, or all that a learner leaves between updates,
    which takes turns with it."""
    if isinstance(config, PolicyConfig) and config.serving.vllm.rest_while_learning:
        return int(card * _TAKEN) - kept_between_updates(config, shape)
    return int(config.serving.memory_utilization * card)


def starved_replica(config: CommonConfig, shape: ModelShape, card: int | None) -> str:
    """A sentence where vLLM's share of a GPU of `card` bytes leaves no room for one sample; empty where it does."""
    serving = config.serving
    if serving.expected_engine != "vllm" or card is None:
        return ""
    sizes = {part.name: part.bytes for part in _vllm(config, shape, card)}
    sample = serving.max_context * _kv_bytes_per_token(config, shape)
    if sizes[KV] >= sample:
        return ""
    if serving.vllm.rest_while_learning:
        return (
            f"The weights of replica and learner leave {text(sizes[KV])} of the GPU for keys and values, and one "
            f"sample of serving.max_context {serving.max_context} takes {text(sample)}: use a larger GPU."
        )
    return (
        f"A replica's share of the GPU, {text(int(serving.memory_utilization * card))}, leaves {text(sizes[KV])} for "
        f"keys and values, and one sample of serving.max_context {serving.max_context} takes {text(sample)}: raise "
        f"serving.vllm.gpu_memory_utilization ({serving.memory_utilization:g}), or use a larger GPU."
    )


def vllm_lora_parameters(config: CommonConfig, shape: ModelShape) -> int:
    """Parameters that vLLM sets aside for adapters: all linear layers of the language model, at a rank that it has
    kernels for."""
    rank = next((rank for rank in VLLM_RANKS if rank >= config.max_lora_rank), config.max_lora_rank)
    return config.lora_slots * shape.lora_parameters(rank, "all")


def _replica_weights(config: CommonConfig, shape: ModelShape, parallel: int = 1) -> Part:
    element, quantization = ELEMENT[config.model.dtype], config.serving.quantization
    small = {"fp8": 1.0, "nf4": 0.5625}.get(quantization)  # bytes; NF4 with its scales
    quantized = shape.text.linear_parameters if small is not None else 0
    size = (shape.parameters - quantized) * element + quantized * (small or 0)
    precision = config.model.dtype if small is None else f"{config.model.dtype}, linear layers {quantization}"
    shared = f", over {parallel} GPUs" if parallel > 1 else ""
    return Part("weights", int(size) // parallel, f"{amount(shape.parameters)} in {precision}{shared}")


def _vllm_adapters(config: CommonConfig, shape: ModelShape) -> Part:
    return Part(
        "adapters",
        vllm_lora_parameters(config, shape) * ELEMENT[config.model.dtype] // config.serving.vllm.tensor_parallel_size,
        f"{config.lora_slots} slots of rank {config.max_lora_rank}",
    )


def _vllm_fixed(config: CommonConfig, shape: ModelShape) -> list[Part]:
    serving, text_shape, element = config.serving, shape.text, ELEMENT[config.model.dtype]
    settings, parallel = serving.vllm, serving.vllm.tensor_parallel_size
    tokens = settings.max_num_batched_tokens
    logits = settings.max_num_seqs * text_shape.vocab * 4 * _LOGIT_COPIES["vllm"]
    parts = [
        _replica_weights(config, shape, parallel),
        *([] if config.trains_full else [_vllm_adapters(config, shape)]),
        Part(
            "activations",
            tokens * (4 * text_shape.hidden + 3 * text_shape.width) * element + logits,
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


def _kv_bytes_per_token(config: CommonConfig, shape: ModelShape) -> int:
    """Keys and values of one token on each of a replica's GPUs. A head is never cut: more GPUs than key heads hold
    some twice."""
    shares = min(config.serving.vllm.tensor_parallel_size, shape.text.kv_heads)
    return shape.kv_bytes_per_token(ELEMENT[config.model.dtype]) // shares


def _vllm(config: CommonConfig, shape: ModelShape, card: int | None) -> list[Part]:
    parts, serving = _vllm_fixed(config, shape), config.serving
    per_token = _kv_bytes_per_token(config, shape)
    if not serving.gpus_per_replica:
        size = serving.vllm.kv_cache_gib * GIB
    elif serving.vllm.gpu_kv_cache_gib is not None:
        size = int(serving.vllm.gpu_kv_cache_gib * GIB)
    elif card is not None:
        size = max(_share(config, shape, card) - sum(part.bytes for part in parts), 0)
    else:
        size = per_token * serving.max_context  # the least: one sample
    rows = size / (per_token * serving.max_context)
    return [*parts, Part(KV, size, f"{size // per_token} tokens, {rows:.1f} samples of {serving.max_context}")]


def _transformers(config: CommonConfig, shape: ModelShape) -> list[Part]:
    serving, text_shape, element = config.serving, shape.text, ELEMENT[config.model.dtype]
    rows = min(serving.max_rows, max(1, config.samples_per_round // serving.num_replicas))
    per_token = shape.kv_bytes_per_token(element)
    wide = PREFILL_TOKENS * (6 * text_shape.hidden + 3 * text_shape.width) * element
    parts = [_replica_weights(config, shape)]
    if config.trains_full:
        # On a CPU they lie in the object store, once for all replicas of a node.
        versions = 2 * shape.parameters * element if serving.gpus_per_replica else 0
        parts.append(Part("versions", versions, "the newest weights, and those that running samples finish with"))
    elif not isinstance(config, PolicyConfig):
        pass  # it publishes no versions
    elif serving.quantization == "none" and config.model.dtype == "float32":
        merged = text_shape.linear_parameters * element
        parts.append(
            Part("merged adapters", 2 * merged, "the linear layers again, and once more while a version is made")
        )
    else:  # computed beside the weights
        factors = 4 * shape.lora_parameters(config.model.lora.rank, config.model.lora.target_modules)
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
            config.model.image_cache_bytes
            + tower_pass_bytes(shape, element, patches_at_once(serving.gpus_per_replica)),
            f"features up to {config.model.image_cache_mib} MiB, and a pass of the tower",
        ),
        Part(
            KV,
            keys_and_values,
            f"{rows} samples of {serving.max_context} at most, {text(serving.max_context * per_token)} each",
        ),
        Part("CUDA context", CUDA_CONTEXT, "an estimate"),
    ]
