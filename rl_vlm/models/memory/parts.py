"""Parts of a process's memory: what a learner holds at all times, and what learners and replicas have in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rl_vlm.config import CommonConfig, PolicyConfig
from rl_vlm.models.families.qwen_vl import PATCHES_AT_ONCE
from rl_vlm.models.memory.shape import ELEMENT, GIB, ModelShape, amount, gib

# A CUDA context with the kernels of torch and cuBLAS' workspaces, per process: 0.4 to 0.6 GiB on cards since 2020.
CUDA_CONTEXT = gib(0.6)
_LORA = 4  # bytes of a LoRA weight, its gradient and each of its moments: float32
_GATHERED = 2  # layers of a sharded model that are whole at once: the one that computes, and the next
_PREFERENCE = GIB  # agent, critics and the reward ensemble with its batches: an upper bound for the published sizes


@dataclass(frozen=True, slots=True)
class Part:
    """Memory for one purpose; `detail` says where the number comes from."""

    name: str
    bytes: int
    detail: str = ""


CONTEXT = Part("CUDA context", CUDA_CONTEXT, "an estimate")


def total_of(parts: Iterable[Part]) -> int:
    return sum(part.bytes for part in parts)


def held_by_learner(config: CommonConfig, shape: ModelShape) -> list[Part]:
    """The parts of one learner that it holds between updates, too."""
    if not isinstance(config, PolicyConfig):
        return [Part("agent and reward models", _PREFERENCE, "an upper bound"), CONTEXT]
    parts = (_weights, _trained, _images)
    return [part(config, shape, ELEMENT[config.model.dtype]) for part in parts] + [CONTEXT]


def _weights(config: PolicyConfig, shape: ModelShape, element: int) -> Part:
    rest, layers, own = _shares(config, shape)
    detail = f"{amount(shape.parameters)} in {config.model.dtype}"
    held, reference = shape.parameters * element, shape.parameters * element
    if config.learner.shards_layers:
        shard = 0 if config.trains_full else own * element  # trained ones are the masters
        held = (rest + _GATHERED * layers // shape.text.layers) * element + shard
        reference = rest * element + 4 * own
        detail += ", its layers sharded"
    if config.trains_full and config.algorithm.has_reference:  # the frozen base model, for the KL penalty
        held += reference
        detail += ", and once more as reference"
    return Part("weights", held, detail)


def _shares(config: PolicyConfig, shape: ModelShape) -> tuple[int, int, int]:
    """Parameters outside the decoder's layers, in them, and in what a learner holds of them on its GPU."""
    learner, layers = config.learner, shape.text.parameters
    own = layers // max(learner.num_learners, 1) if learner.shards_layers else layers
    return shape.parameters - layers, layers, 0 if learner.offload_params else own


def _trained(config: PolicyConfig, shape: ModelShape, element: int) -> Part:
    learner, critic, full = config.learner, config.critic, config.trains_full
    head = (shape.text.hidden + 1) * (critic.hidden or 1) + (critic.hidden and critic.hidden + 1) if critic else 0
    lora = shape.lora_parameters(config.model.lora.rank, config.model.lora.target_modules)
    rest, _, own = _shares(config, shape)
    trained = rest + own if full else lora * (2 if critic and critic.kind == "adapter" else 1)
    moments = 2 if learner.optimizer == "adamw" else 0.1  # adafactor keeps sums over rows and columns
    averages = (shape.parameters if full else lora) if learner.ema_decay is not None else 0
    size = 4 * ((trained + head) * (2 + moments) + averages)
    if full and element == 4:  # the weights themselves are the masters
        size -= 4 * (rest if learner.shards_layers else trained)
    elif full:  # a parameter's own gradient is freed as soon as it is added
        size += shape.text.embedding * element
    name = "masters and optimiser" if full else "LoRA and optimiser"
    return Part(name, int(size), f"{amount(trained + head)} in float32 with gradients, {learner.optimizer}")


def update_tokens(config: PolicyConfig) -> int:
    """Tokens of the largest micro-batch."""
    # A row that is longer than a micro-batch goes alone.
    return max(config.learner.micro_batch_tokens, config.serving.max_context)


def _images(config: PolicyConfig, shape: ModelShape, element: int) -> Part:
    full = config.trains_full
    if not full and config.model.lora.target_modules != "vision":
        return frozen_tower(config, shape, element, config.learner.gpus_per_learner)
    # A tower that is trained keeps activations of all images of a micro-batch, which may be all of its tokens.
    tower, patches = shape.tower, update_tokens(config) * shape.tower.merge**2
    inputs = sum(linear.inputs * linear.copies for linear in tower.linears()) * element
    kept = inputs + tower.depth * (element * (4 * tower.hidden + 2 * tower.width) + 8 * tower.hidden)
    if full and config.learner.may_recompute:
        kept = element * tower.hidden * tower.depth + kept // tower.depth
    return Part("images", patches * kept, f"{patches} patches at most, with a gradient")


def frozen_tower(config: CommonConfig, shape: ModelShape, element: int, gpus: float) -> Part:
    """Images of a tower that is not trained, in a process with `gpus`."""
    at_once = PATCHES_AT_ONCE["cuda" if gpus else "cpu"]
    size = config.model.image_cache_bytes + shape.tower.pass_bytes(element, at_once)
    return Part("images", size, f"features up to {config.model.image_cache_mib} MiB, {at_once} patches at a time")


def published_bytes(config: CommonConfig, shape: ModelShape) -> int:
    """Bytes of one version in the object store; 0 for a run that publishes none."""
    if not isinstance(config, PolicyConfig):
        return 0
    if config.trains_full:
        return shape.parameters * ELEMENT[config.published_dtype]
    return _LORA * shape.lora_parameters(config.model.lora.rank, config.model.lora.target_modules)
