"""The memory of one learner at its peak, by arithmetic from the model's shape: no weights, no torch."""

from __future__ import annotations

from rl_vlm.config import CommonConfig, PolicyConfig
from rl_vlm.config.serving import FILLED
from rl_vlm.engines.memory import KV, replica_parts
from rl_vlm.learning.sizes import HEAD_TILES
from rl_vlm.models.memory.parts import CUDA_CONTEXT, Part, held_by_learner, total_of, update_tokens
from rl_vlm.models.memory.placement import learner_fraction
from rl_vlm.models.memory.shape import ELEMENT, ModelShape

OF_UPDATES = ("activations", "attention mask", "logits")  # parts that only an update needs
_HEAD_COPIES = 4  # float32 arrays of a tile's shape at the peak


def learner_parts(config: CommonConfig, shape: ModelShape, card: int | None) -> list[Part]:
    """The parts of one learner on a GPU of `card` bytes; None: the size is not known."""
    held = held_by_learner(config, shape)
    if not isinstance(config, PolicyConfig):
        return held
    return [*held[:2], *_update_parts(config, shape, recomputed_layers(config, shape, card)), *held[2:]]


def recomputed_layers(config: PolicyConfig, shape: ModelShape, card: int | None) -> int:
    """How many of the decoder's layers, the first ones, the backward pass computes again (`learner.checkpoint`).

    `card` as in `learner_parts`. The others keep their activations, which are gone before a layer is computed again.
    """
    chosen, layers = config.learner.checkpoint, shape.text.layers
    if not config.learner.may_recompute:
        return 0
    if chosen != "auto":
        return layers if chosen == "all" else min(int(chosen), layers)
    room = 0 if card is None else _room(config, shape, card)
    # The last layer is always kept, because computing it again would save nothing.
    fitting = (count for count in range(layers) if total_of(_update_parts(config, shape, count)) <= room)
    return next(fitting, layers - 1)


def _room(config: PolicyConfig, shape: ModelShape, card: int) -> int:
    """Bytes that an update may take on a GPU, beside what is there meanwhile."""
    fraction, held = learner_fraction(config, card), held_by_learner(config, shape)
    if config.takes_turns:
        held += [part for part in replica_parts(config, shape, card) if part.name != KV]
    share = card if fraction is None else fraction * card + CUDA_CONTEXT
    return int(FILLED * share) - total_of(held)


def _update_parts(config: PolicyConfig, shape: ModelShape, recomputed: int) -> list[Part]:
    element = ELEMENT[config.model.dtype]
    return [
        _activations(config, shape, element, recomputed),
        _mask(config, shape, element, recomputed),
        _logits(config, shape, element),
    ]


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
    return norms + element * (kept + inputs + rank * len(adapted) + text.state_inputs // text.layers)


def _activations(config: PolicyConfig, shape: ModelShape, element: int, recomputed: int) -> Part:
    text, lora, tokens = shape.text, config.model.lora, update_tokens(config)
    # Linear layers that are trained whole keep their inputs, as those with LoRA do.
    rank, targets = (0, "all") if config.trains_full else (lora.rank, lora.target_modules)
    layer = layer_bytes_per_token(shape, element, rank, targets)
    working = 3 * text.width * element
    # While a layer is computed again it takes as much as one that is kept.
    inputs, whole = element * text.hidden, max(text.layers - recomputed, 1)
    kept = inputs * (text.layers - whole) + layer * whole
    what = f"{tokens} tokens × {text.layers} layers, of which {recomputed} are computed again"
    return Part("activations", tokens * (kept + 2 * inputs + working), what)


def _mask(config: PolicyConfig, shape: ModelShape, element: int, recomputed: int) -> Part:
    tokens, longest = update_tokens(config), config.serving.max_context
    # As numbers that are added to the scores, by each layer for its backward pass.
    layers = max(shape.text.layers - recomputed, 1)
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
    rows, columns = min(rows, update_tokens(config)), min(columns, shape.text.vocab)
    # Beside a tile: the slope of each log-probability, which the backward pass scales, and the sum that it grows from.
    slopes = 2 * 4 * update_tokens(config) * shape.text.hidden
    of_head = 4 * shape.text.embedding if config.trains_full else 0  # its own gradient is collected in float32
    size = rows * columns * (element + 4 * _HEAD_COPIES) + slopes + of_head
    return Part("logits", size, f"{rows} × {columns} at a time, and slopes")
