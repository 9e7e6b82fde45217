"""What a learner holds on a GPU: weights, what is trained with its optimiser, activations of one micro-batch, logits, image features."""

from __future__ import annotations

from rl_vlm.config import RunConfig
from rl_vlm.models.memory.parts import (
    CUDA_CONTEXT,
    ELEMENT,
    GIB,
    HEAD_TILES,
    Part,
    amount,
    patches_at_once,
    tower_pass_bytes,
)
from rl_vlm.models.memory.shape import ModelShape

_HEAD_COPIES = 4  # float32 arrays of a tile's shape at the peak
_LORA = 4  # bytes of a LoRA weight, its gradient and each of its moments: float32
OF_UPDATES = ("activations", "attention mask", "logits")  # parts that only an update needs
_GATHERED = 2  # layers of a sharded model that are whole at once: the one that computes, and the next
_PREFERENCE = 1 * GIB  # agent, critics and the reward ensemble with its batches: an upper bound for the published sizes


def layer_bytes_per_token(shape: ModelShape, element: int, rank: int, target_modules: str, lora: int = _LORA) -> int:
    """What one decoder layer keeps for its backward pass, per token, without the attention mask.

    `element`: bytes of the model's precision; `lora`: of the precision that LoRA layers compute in. Attention keeps what
    a flash kernel does: queries, keys, values and its output. Equals a count of what autograd saves on the meta device.
    """
    text = shape.text
    queries, keys = text.heads * text.head_dim, text.kv_heads * text.head_dim
    norms = 2 * (text.hidden + 1) + text.head_norms * (queries + keys + text.heads + text.kv_heads)
    attention = 2 * queries + 2 * keys
    mlp = 3 * text.token_width  # gate, its activation, up: their product and the frozen projections keep nothing
    if text.experts:
        mlp += text.experts_per_token * text.hidden  # the experts' outputs, before they are weighted
    adapted = [linear for linear in shape.adapted(target_modules) if linear in list(text.linears()) and linear.copies]
    if lora != element:  # every LoRA layer keeps a copy of its input in its own precision
        inputs = lora * sum(linear.inputs for linear in adapted)
    else:  # shared where layers have the same input; the attention's output is kept already
        names = {linear.name for linear in adapted}
        shared = [names & {"q_proj", "k_proj", "v_proj"}, names & {"gate_proj", "up_proj"}]
        inputs = element * (sum(map(bool, shared)) * text.hidden + ("down_proj" in names) * text.width)
    return 4 * norms + element * (attention + mlp) + inputs + lora * rank * len(adapted)


def full_layer_bytes_per_token(shape: ModelShape, element: int) -> int:
    """As `layer_bytes_per_token` where all weights are trained: linear layers keep their inputs, norms what they scale."""
    text = shape.text
    scaled = 2 * text.hidden + text.head_norms * (text.heads + text.kv_heads) * text.head_dim
    return layer_bytes_per_token(shape, element, 0, "all", lora=element) + element * scaled


def learner_parts(run: RunConfig, shape: ModelShape) -> list[Part]:
    """The parts of one learner of a policy run."""
    model, element = run.model, ELEMENT[run.model.dtype]
    return [
        _weights(run, shape, element),
        *(_trained_whole(run, shape, element) if model.train == "full" else [_trained_lora(run, shape)]),
        _activations(run, shape, element),
        _mask(run, shape, element),
        _logits(run, shape, element),
        _images(run, shape, element),
        Part("CUDA context", CUDA_CONTEXT, "an estimate"),
    ]


def kept_between_updates(run: RunConfig, shape: ModelShape) -> int:
    """Bytes that one learner of a policy run holds while it waits."""
    return sum(part.bytes for part in learner_parts(run, shape) if part.name not in OF_UPDATES)


def _trained_whole(run: RunConfig, shape: ModelShape, element: int) -> list[Part]:
    learner, count = run.learner, shape.parameters
    moments = 2 if learner.optimizer == "adamw" else 0.1
    # Masters are the weights themselves where these are float32; else a parameter's own gradient is freed as soon as it is added.
    masters = 0 if element == 4 else 1
    largest = shape.text.embedding * element if masters else 0
    averages = int(learner.ema_decay is not None)
    head = _head_parameters(run, shape) * 4 * (2 + moments)
    parts = [
        Part(
            "masters and optimiser",
            int(count * 4 * (masters + 1 + moments + averages) + largest + head),
            f"{amount(count)} in float32: {'masters, ' if masters else ''}gradients, {learner.optimizer}",
        )
    ]
    if run.algorithm.has_reference:
        parts.append(Part("reference", count * element, f"the base model in {run.model.dtype}, for the KL penalty"))
    return parts


def _head_parameters(run: RunConfig, shape: ModelShape) -> int:
    """Of the critic's head."""
    if run.critic is None:
        return 0
    width = run.critic.hidden
    return (shape.text.hidden + 1) * width + width + 1 if width else shape.text.hidden + 1


def _trained_lora(run: RunConfig, shape: ModelShape) -> Part:
    learner, lora = run.learner, run.model.lora
    adapter = shape.lora_parameters(lora.rank, lora.target_modules)
    trained = adapter + _head_parameters(run, shape)
    if run.critic is not None:
        trained += adapter if run.critic.kind == "adapter" else 0
    moments = 2 if learner.optimizer == "adamw" else 0.1  # adafactor keeps sums over rows and columns
    kept = adapter if learner.ema_decay is not None else 0
    return Part(
        "LoRA and optimiser",
        int(trained * _LORA * (2 + moments) + kept * _LORA),
        f"{amount(trained)} in float32: weights, gradients, {learner.optimizer}",
    )


def _weights(run: RunConfig, shape: ModelShape, element: int) -> Part:
    learner, layers = run.learner, shape.text.parameters
    if not learner.shards_layers:
        return Part("weights", shape.parameters * element, f"{amount(shape.parameters)} in {run.model.dtype}")
    whole = shape.parameters - layers
    gathered = _GATHERED * layers // shape.text.layers
    shard = 0 if learner.offload_params else layers // max(learner.num_learners, 1)
    where = "host memory" if learner.offload_params else f"{learner.num_learners} shards"
    return Part(
        "weights",
        (whole + gathered + shard) * element,
        f"{amount(layers)} in {where}, {_GATHERED} layers of them gathered, and {amount(whole)} whole, in {run.model.dtype}",
    )


def _tokens(run: RunConfig) -> int:
    # A row that is longer than a micro-batch goes alone.
    return max(run.learner.micro_batch_tokens, run.serving.max_context)


def _activations(run: RunConfig, shape: ModelShape, element: int) -> Part:
    text, lora, tokens = shape.text, run.model.lora, _tokens(run)
    if run.model.train == "full":
        layer, working = full_layer_bytes_per_token(shape, element), 3 * text.token_width * element
    else:
        layer = layer_bytes_per_token(shape, element, lora.rank, lora.target_modules)
        # At its widest a layer holds the product of a linear layer, its LoRA's in float32 twice, and their sum.
        working = text.token_width * (element + 3 * _LORA)
    inputs = element * text.hidden
    if run.learner.gradient_checkpointing:
        per_token = inputs * (text.layers + 2) + layer + working
        detail = f"{tokens} tokens × {text.layers} layers' inputs, and one layer computed again"
    else:
        per_token = layer * text.layers + 2 * inputs + working
        detail = f"{tokens} tokens × {text.layers} layers, no checkpointing"
    return Part("activations", tokens * per_token, detail)


def _logits(run: RunConfig, shape: ModelShape, element: int) -> Part:
    rows, columns = HEAD_TILES["cuda" if run.learner.gpus_per_learner else "cpu"]
    rows, columns = min(rows, _tokens(run)), min(columns, shape.text.vocab)
    # Beside a tile: the slope of each log-probability, which the backward pass scales, and the sum that it grows from.
    slopes = 2 * 4 * _tokens(run) * shape.text.hidden
    # The head's own gradient is collected in float32.
    of_head = 4 * shape.text.embedding if run.model.train == "full" else 0
    return Part(
        "logits",
        rows * columns * (element + 4 * _HEAD_COPIES) + slopes + of_head,
        f"{rows} × {columns} at a time, and slopes",
    )


def _mask(run: RunConfig, shape: ModelShape, element: int) -> Part:
    tokens, longest = _tokens(run), run.serving.max_context
    # As numbers that are added to the scores, by each layer for its backward pass.
    layers = 1 if run.learner.gradient_checkpointing else shape.text.layers
    if (
        run.learner.attention != "dense"
    ):  # a continuation sees at most a context; auto takes a dense mask where that is less
        # Query heads that share a key head have a mask of their own each: see models/grouped_heads.py.
        groups = shape.text.heads // shape.text.kv_heads
        size = longest**2 + groups * tokens * longest * element * layers
        return Part("attention mask", size, f"{tokens} tokens, each beside {longest} at most")
    # A packed row, a prompt with all its continuations, may be as long as a micro-batch; bytes while its mask is made.
    length = tokens if run.learner.share_prompts else longest
    return Part("attention mask", length**2 * (4 + element * layers), f"{length}² of one row")


def _images(run: RunConfig, shape: ModelShape, element: int) -> Part:
    whole = run.model.train == "full"
    if not whole and run.model.lora.target_modules != "vision":
        at_once = patches_at_once(run.learner.gpus_per_learner)
        detail = f"features up to {run.model.image_cache_mib} MiB, {at_once} patches at a time"
        return Part("images", run.model.image_cache_bytes + tower_pass_bytes(shape, element, at_once), detail)
    # A tower that is trained keeps its layers' activations of all images of a micro-batch, whose tokens are at most all.
    tower, patches = shape.tower, _tokens(run) * shape.tower.merge**2
    inputs = sum(linear.inputs * linear.copies for linear in tower.linears()) * (element if whole else _LORA)
    kept = inputs + tower.depth * (element * (4 * tower.hidden + 2 * tower.width) + 8 * tower.hidden)
    if whole and run.learner.gradient_checkpointing:
        kept = element * tower.hidden * tower.depth + kept // tower.depth
    return Part("images", patches * kept, f"{patches} patches at most, with a gradient")


def preference_learner_parts() -> list[Part]:
    """The parts of a learner of a preference run."""
    return [
        Part("agent and reward models", _PREFERENCE, "an upper bound"),
        Part("CUDA context", CUDA_CONTEXT, "an estimate"),
    ]
