"""The memory plan: what learners and replicas need at their peak, which of them share a GPU, and what is left there."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

from rl_vlm.config import CommonConfig, PolicyConfig
from rl_vlm.models.memory.shape import (
    ELEMENT,
    GIB,
    HEAD_TILES,
    PATCHES_AT_ONCE,
    PATCHES_ON_CPU,
    PREFILL_TOKENS,
    ModelShape,
    amount,
    gib,
    text,
)

KV = "keys and values"
OF_UPDATES = ("activations", "attention mask", "logits")  # parts that only an update needs
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # of LoRA: what vLLM has kernels for

_HEAD_COPIES = 4  # float32 arrays of a tile's shape at the peak
_LORA = 4  # bytes of a LoRA weight, its gradient and each of its moments: float32
_GATHERED = 2  # layers of a sharded model that are whole at once: the one that computes, and the next
_VLLM_LOGITS, _OUR_LOGITS = 3, 8  # copies of float32 logits, while a token is drawn
_FREE_SHARE = 0.8  # of free memory that keys and values may take without a GPU
_TAKEN = 0.92  # of a GPU on which replica and learner take turns: their other parts are estimates
_NEVER_LEFT = 0.02  # of a card: what the caching allocator of torch cannot hand out, an estimate
# A CUDA context with the kernels of torch and cuBLAS' workspaces, per process: 0.4 to 0.6 GiB on cards since 2020.
CUDA_CONTEXT = gib(0.6)
_GRAPHS = gib(0.6)  # CUDA graphs of vLLM, with LoRA
_PREFERENCE = GIB  # agent, critics and the reward ensemble with its batches: an upper bound for the published sizes


@dataclass(frozen=True, slots=True)
class Part:
    """Memory for one purpose; `detail` says where the number comes from."""

    name: str
    bytes: int
    detail: str = ""


_CONTEXT = Part("CUDA context", CUDA_CONTEXT, "an estimate")


def _sum(parts: Iterable[Part]) -> int:
    return sum(part.bytes for part in parts)


# A learner.


def layer_bytes_per_token(shape: ModelShape, element: int, rank: int, target_modules: str) -> int:
    """What one decoder layer keeps for its backward pass, per token, with a flash kernel and without its mask.

    `element`: bytes of the model's precision. Equals what autograd saves on the meta device.
    """
    text = shape.text
    queries, keys = text.heads * text.head_dim, text.kv_heads * text.head_dim
    # Of a norm its input, and a float32 number per vector.
    norms = element * (2 * text.hidden + text.head_norms * (queries + keys))
    norms += 4 * (2 + text.head_norms * (text.heads + text.kv_heads))
    # Of the MLP the gate, its activation and up: their product and the frozen projections keep nothing.
    kept = 2 * queries + 2 * keys + 3 * text.width
    adapted = {linear.name: linear for linear in text.linears() if linear in shape.adapted(target_modules)}
    # Inputs that layers share are kept once; the attention's output is kept already.
    shared = [adapted.keys() & {"q_proj", "k_proj", "v_proj"}, adapted.keys() & {"gate_proj", "up_proj"}]
    inputs = sum(map(bool, shared)) * text.hidden + ("down_proj" in adapted) * text.width
    return norms + element * (kept + inputs + rank * len(adapted))


def learner_parts(config: CommonConfig, shape: ModelShape) -> list[Part]:
    """The parts of one learner."""
    if not isinstance(config, PolicyConfig):
        return [Part("agent and reward models", _PREFERENCE, "an upper bound"), _CONTEXT]
    parts = (_weights, _trained, _activations, _mask, _logits, _images)
    return [part(config, shape, ELEMENT[config.model.dtype]) for part in parts] + [_CONTEXT]


def _weights(config: PolicyConfig, shape: ModelShape, element: int) -> Part:
    learner, layers = config.learner, shape.text.parameters
    detail = f"{amount(shape.parameters)} in {config.model.dtype}"
    held = shape.parameters
    if learner.shards_layers:
        shard = 0 if learner.offload_params else layers // max(learner.num_learners, 1)
        held += _GATHERED * layers // shape.text.layers + shard - layers
        detail += ", its layers sharded"
    elif config.trains_full and config.algorithm.has_reference:  # the frozen base model, for the KL penalty
        held *= 2
        detail += ", and once more as reference"
    return Part("weights", held * element, detail)


def _trained(config: PolicyConfig, shape: ModelShape, element: int) -> Part:
    learner, critic, full = config.learner, config.critic, config.trains_full
    head = (shape.text.hidden + 1) * (critic.hidden or 1) + (critic.hidden and critic.hidden + 1) if critic else 0
    lora = shape.lora_parameters(config.model.lora.rank, config.model.lora.target_modules)
    trained = shape.parameters if full else lora * (2 if critic and critic.kind == "adapter" else 1)
    moments = 2 if learner.optimizer == "adamw" else 0.1  # adafactor keeps sums over rows and columns
    averages = (shape.parameters if full else lora) if learner.ema_decay is not None else 0
    size = 4 * ((trained + head) * (2 + moments) + averages)
    if full and element == 4:  # the weights themselves are the masters
        size -= 4 * trained
    elif full:  # a parameter's own gradient is freed as soon as it is added
        size += shape.text.embedding * element
    name = "masters and optimiser" if full else "LoRA and optimiser"
    return Part(name, int(size), f"{amount(trained + head)} in float32 with gradients, {learner.optimizer}")


def _tokens(config: PolicyConfig) -> int:
    # A row that is longer than a micro-batch goes alone.
    return max(config.learner.micro_batch_tokens, config.serving.max_context)


def _activations(config: PolicyConfig, shape: ModelShape, element: int) -> Part:
    text, lora, tokens = shape.text, config.model.lora, _tokens(config)
    # Linear layers that are trained whole keep their inputs, as those with LoRA do.
    rank, targets = (0, "all") if config.trains_full else (lora.rank, lora.target_modules)
    layer = layer_bytes_per_token(shape, element, rank, targets)
    working = 3 * text.width * element
    inputs, what = element * text.hidden, f"{tokens} tokens × {text.layers} layers"
    if config.learner.gradient_checkpointing:
        kept, what = inputs * text.layers + layer, f"{what}' inputs, and one layer computed again"
    else:
        kept, what = layer * text.layers, f"{what}, no checkpointing"
    return Part("activations", tokens * (kept + 2 * inputs + working), what)


def _mask(config: PolicyConfig, shape: ModelShape, element: int) -> Part:
    tokens, longest = _tokens(config), config.serving.max_context
    # As numbers that are added to the scores, by each layer for its backward pass.
    layers = 1 if config.learner.gradient_checkpointing else shape.text.layers
    if config.learner.attention == "dense":
        # A packed row, a prompt with all its continuations, may be as long as a micro-batch; bytes while it is made.
        length = tokens if config.learner.share_prompts else longest
        return Part("attention mask", length**2 * (4 + element * layers), f"{length}² of one row")
    # A continuation sees at most a context; auto takes a dense mask where that is less. Query heads that share a key
    # head have a mask of their own each: see `masked_attention`.
    groups = shape.text.heads // shape.text.kv_heads
    size = longest**2 + groups * tokens * longest * element * layers
    return Part("attention mask", size, f"{tokens} tokens, each beside {longest} at most")


def _logits(config: PolicyConfig, shape: ModelShape, element: int) -> Part:
    rows, columns = HEAD_TILES["cuda" if config.learner.gpus_per_learner else "cpu"]
    rows, columns = min(rows, _tokens(config)), min(columns, shape.text.vocab)
    # Beside a tile: the slope of each log-probability, which the backward pass scales, and the sum that it grows from.
    slopes = 2 * 4 * _tokens(config) * shape.text.hidden
    of_head = 4 * shape.text.embedding if config.trains_full else 0  # its own gradient is collected in float32
    size = rows * columns * (element + 4 * _HEAD_COPIES) + slopes + of_head
    return Part("logits", size, f"{rows} × {columns} at a time, and slopes")


def _images(config: PolicyConfig, shape: ModelShape, element: int) -> Part:
    full = config.trains_full
    if not full and config.model.lora.target_modules != "vision":
        return _frozen_tower(config, shape, element, config.learner.gpus_per_learner)
    # A tower that is trained keeps activations of all images of a micro-batch, which may be all of its tokens.
    tower, patches = shape.tower, _tokens(config) * shape.tower.merge**2
    inputs = sum(linear.inputs * linear.copies for linear in tower.linears()) * element
    kept = inputs + tower.depth * (element * (4 * tower.hidden + 2 * tower.width) + 8 * tower.hidden)
    if full and config.learner.gradient_checkpointing:
        kept = element * tower.hidden * tower.depth + kept // tower.depth
    return Part("images", patches * kept, f"{patches} patches at most, with a gradient")


def _frozen_tower(config: CommonConfig, shape: ModelShape, element: int, gpus: float) -> Part:
    at_once = PATCHES_AT_ONCE if gpus else PATCHES_ON_CPU
    size = config.model.image_cache_bytes + shape.tower.pass_bytes(element, at_once)
    return Part("images", size, f"features up to {config.model.image_cache_mib} MiB, {at_once} patches at a time")


# A replica, on each of its GPUs.


def replica_parts(config: CommonConfig, shape: ModelShape, card: int | None) -> list[Part]:
    """The parts of one replica on one GPU of `card` bytes; None: the size is not known."""
    serving = config.serving
    if serving.expected_engine == "vllm":
        parts, size = _vllm(config, shape), _vllm_kv(config, shape, card)
    else:
        parts, size = _transformers(config, shape), _rows(config) * _sample(config, shape)
        if serving.max_kv_gib is not None:
            size = min(size, gib(serving.max_kv_gib))
    samples = size / _sample(config, shape)
    tokens = int(samples * serving.max_context)
    return [*parts, Part(KV, size, f"{tokens} tokens, {samples:.1f} samples of {serving.max_context}")]


def _rows(config: CommonConfig) -> int:
    """Samples of a round that run on one replica with the transformers engine."""
    return min(config.serving.max_rows, max(1, config.samples_per_round // config.serving.num_replicas))


def _sample(config: CommonConfig, shape: ModelShape) -> int:
    """Keys and values of one sample of `serving.max_context` on each of a replica's GPUs."""
    parallel = config.serving.vllm.tensor_parallel_size if config.serving.expected_engine == "vllm" else 1
    shares = min(parallel, shape.text.kv_heads)  # a head is never cut: more GPUs than key heads hold some twice
    return config.serving.max_context * shape.kv_bytes_per_token(ELEMENT[config.model.dtype]) // shares


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
    parts = [_served_weights(config, shape, parallel), _CONTEXT]
    if not config.trains_full:  # all linear layers of the language model, at a rank that vLLM has kernels for
        rank = next((rank for rank in VLLM_RANKS if rank >= config.max_lora_rank), config.max_lora_rank)
        size = config.lora_slots * shape.lora_parameters(rank, "all") * element // parallel
        parts.append(Part("adapters", size, f"{config.lora_slots} slots of rank {rank}"))
    logits = settings.max_num_seqs * text.vocab * 4 * _VLLM_LOGITS
    activations = tokens * (4 * text.hidden + 3 * text.width) * element + logits
    parts.append(Part("activations", activations, f"{tokens} tokens a step, {settings.max_num_seqs} samples' logits"))
    # vLLM encodes at most a step's tokens of images, and keeps as many encoded ones.
    kept = tokens * text.hidden * (1 + len(shape.tower.deepstack)) * element
    images = shape.tower.pass_bytes(element, tokens * shape.tower.merge**2) + kept
    parts.append(Part("images", images, f"{tokens} image tokens encoded, and as many kept"))
    if not settings.enforce_eager and config.serving.gpus_per_replica:
        parts.append(Part("CUDA graphs", _GRAPHS, "an estimate"))
    return parts


def _vllm_kv(config: CommonConfig, shape: ModelShape, card: int | None) -> int:
    serving = config.serving
    if not serving.gpus_per_replica:
        return serving.vllm.kv_cache_gib * GIB
    if serving.vllm.gpu_kv_cache_gib is not None:
        return gib(serving.vllm.gpu_kv_cache_gib)
    if card is None:
        return _sample(config, shape)  # the least
    if isinstance(config, PolicyConfig) and serving.vllm.rest_while_learning:  # all that a learner leaves
        kept = _sum(part for part in learner_parts(config, shape) if part.name not in OF_UPDATES)
        share = int(card * _TAKEN) - kept
    else:
        share = int(serving.memory_utilization * card)
    return max(share - _sum(_vllm(config, shape)), 0)


def _transformers(config: CommonConfig, shape: ModelShape) -> list[Part]:
    serving, text, element = config.serving, shape.text, ELEMENT[config.model.dtype]
    parts = [_served_weights(config, shape), _CONTEXT]
    if config.trains_full:
        # Without a GPU they stay in the object store.
        size = shape.parameters * element * 2 if serving.gpus_per_replica else 0
        parts.append(Part("versions", size, "the newest weights, and those that running samples finish with"))
    elif isinstance(config, PolicyConfig) and serving.quantization == "none" and config.model.dtype == "float32":
        size = 2 * text.linear_parameters * element
        parts.append(Part("merged adapters", size, "the linear layers again, and once more while a version is made"))
    elif isinstance(config, PolicyConfig):  # computed beside the weights
        size = 2 * published_bytes(config, shape)
        parts.append(Part("adapters", size, "the newest, and the one that running samples finish with"))
    rows, prefill = _rows(config), PREFILL_TOKENS * (6 * text.hidden + 3 * text.width) * element
    size = prefill + rows * text.vocab * 4 * _OUR_LOGITS
    parts.append(Part("activations", size, f"{PREFILL_TOKENS} prompt tokens at a time, {rows} samples' logits"))
    return [*parts, _frozen_tower(config, shape, element, serving.gpus_per_replica)]


def kv_cache_bytes(config: CommonConfig, shape: ModelShape, card: int) -> int | None:
    """What vLLM is told to take for keys and values on a GPU of `card` bytes; None: it measures what is free.

    On a shared card it would count what else is loaded meanwhile. Where no sample fits, vLLM rejects the number with a
    sentence of its own.
    """
    if config.serving.vllm.gpu_kv_cache_gib is None and not 0 < config.serving.gpus_per_replica < 1:
        return None
    return max(_vllm_kv(config, shape, card), shape.kv_bytes_per_token(ELEMENT[config.model.dtype]))


def max_kv_tokens(config: CommonConfig, shape: ModelShape, card: int, free: int) -> int:
    """Tokens whose keys and values a replica with the transformers engine has memory for: one full context at least.

    card: bytes of its GPU, 0 without one; free: without a GPU, the replica's part of its machine's free memory.
    """
    serving = config.serving
    if serving.max_kv_gib is not None:
        size = gib(serving.max_kv_gib)
    elif card:
        size = int(serving.memory_utilization * card) - _sum(_transformers(config, shape))
    else:
        size = int(_FREE_SHARE * free)
    return max(size // shape.kv_bytes_per_token(ELEMENT[config.model.dtype]), serving.max_context)


def published_bytes(config: CommonConfig, shape: ModelShape) -> int:
    """Bytes of one version in the object store; 0 for a run that publishes none."""
    if not isinstance(config, PolicyConfig):
        return 0
    if config.trains_full:
        return shape.parameters * ELEMENT[config.published_dtype]
    return _LORA * shape.lora_parameters(config.model.lora.rank, config.model.lora.target_modules)


# Which of them are on one GPU.


def place(config: CommonConfig) -> list[list[str]]:
    """The kinds of processes on each GPU, as Ray places them on one node: replicas first, each where it first fits."""
    free: list[float] = []
    placed: list[list[str]] = []
    for actors in config.actors:
        kind = actors.kind.split()[0].removesuffix("s")
        for _ in range(actors.count if actors.gpus and kind in ("replica", "learner") else 0):
            fitting = [number for number, room in enumerate(free) if room >= actors.gpus - 1e-9]
            if fitting:
                chosen = min(fitting, key=free.__getitem__)  # Ray fills the GPU that is left with least
                free[chosen] -= actors.gpus
                placed[chosen].append(kind)
            else:  # a new GPU, or several
                free += [max(1 - actors.gpus, 0.0)] * math.ceil(actors.gpus)
                placed += [[kind] for _ in range(math.ceil(actors.gpus))]
    return placed


def shares_gpu(config: CommonConfig) -> bool:
    """Whether a replica and a learner are on one GPU."""
    return any(len(set(kinds)) > 1 for kinds in place(config))


def driver_gpu(config: CommonConfig) -> int:
    """The number of the learners' first GPU where Ray gives the replicas the first ones."""
    return next((number for number, kinds in enumerate(place(config)) if "learner" in kinds), 0)


def learner_fraction(config: CommonConfig, card: int) -> float | None:
    """The share of a GPU of `card` bytes that torch may allocate in a learner, CUDA contexts not counted; None: all.

    Beside one replica of vLLM that is all that vLLM leaves; else the share that Ray was told.
    """
    share = config.learner.gpus_per_learner
    here = next((kinds for kinds in place(config) if "learner" in kinds), ["learner"])
    # A replica that takes turns with the learner allocates nothing meanwhile.
    if len(here) == 1 or not 0 < share < 1 or config.serving.vllm.rest_while_learning:
        return None
    if sorted(here) == ["learner", "replica"] and config.serving.expected_engine == "vllm":
        share = max(share, 1 - config.serving.memory_utilization)
    return max(share - CUDA_CONTEXT / card, 0.05)


@dataclass(frozen=True, slots=True)
class Process:
    """A process on a GPU, and its parts there."""

    kind: str
    bytes: int
    parts: list[Part]


@dataclass(frozen=True, slots=True)
class Card:
    """GPUs of a run that hold the same."""

    count: int
    size: int | None  # bytes that each reports, where that is known
    used: int  # the most that the processes hold together
    left: int | None  # beside the processes and the allocator's loss; negative where they do not fit
    turns: bool  # the replica's keys and values are never there together with what an update needs
    processes: list[Process]


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The GPUs of a run, as `rl-vlm plan --json` prints them. Without GPUs one card stands for the machine's memory."""

    fits: bool  # nothing is known not to fit
    starved: str  # a sentence where a replica's share of a GPU holds no sample
    adapter_bytes: int  # of one published version: an adapter in float32, or all weights in the model's precision
    gpus: int
    parameters: int
    cards: list[Card]


def plan_memory(config: CommonConfig, shape: ModelShape, card: int | None) -> MemoryPlan:
    """The plan for GPUs of `card` bytes each."""
    parts = {"replica": replica_parts(config, shape, card), "learner": learner_parts(config, shape)}
    placed = place(config)
    starved = _starved(config, shape, card) if placed else ""
    if not placed:  # no process has a CUDA context, and the size of a GPU means nothing
        card = None
        parts = {kind: [part for part in held if part != _CONTEXT] for kind, held in parts.items()}
    cards: list[Card] = []
    for kinds, same in itertools.groupby(placed or [["replica", "learner"] if config.serves else ["learner"]]):
        processes = [Process(kind, _sum(parts[kind]), parts[kind]) for kind in kinds]
        used = sum(process.bytes for process in processes)
        turns = bool(placed) and config.serving.vllm.rest_while_learning and set(kinds) == {"replica", "learner"}
        if turns:
            keys = _sum(part for part in parts["replica"] if part.name == KV)
            used -= min(keys, _sum(part for part in parts["learner"] if part.name in OF_UPDATES))
        left = None if card is None else int(card * (1 - _NEVER_LEFT)) - used
        cards.append(Card(len(list(same)), card, used, left, turns, processes))
    fits = not starved and all(one.left is None or one.left >= 0 for one in cards)
    return MemoryPlan(fits, starved, published_bytes(config, shape), len(placed), shape.parameters, cards)


def _starved(config: CommonConfig, shape: ModelShape, card: int | None) -> str:
    """A sentence where vLLM's share of a GPU leaves no room for one sample, else nothing."""
    serving = config.serving
    on_vllm = config.serves and serving.gpus_per_replica and serving.expected_engine == "vllm"
    if card is None or not on_vllm or (size := _vllm_kv(config, shape, card)) >= _sample(config, shape):
        return ""
    advice = "use a larger GPU"
    if not serving.vllm.rest_while_learning:
        advice = f"raise serving.vllm.gpu_memory_utilization ({serving.memory_utilization:g}), or {advice}"
    return (
        f"A replica has {text(size)} of the GPU for keys and values, and one sample of serving.max_context "
        f"{serving.max_context} takes {text(_sample(config, shape))}: {advice}."
    )
