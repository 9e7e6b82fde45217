"""The memory plan: what learners and replicas need at their peak, which of them share a GPU, and what is left there."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from rl_vlm.config import CommonConfig, PolicyConfig
from rl_vlm.engines.memory import KV, replica_parts, sample_bytes, samples_at_once, vllm_kv
from rl_vlm.learning.memory import OF_UPDATES, learner_parts
from rl_vlm.models.memory.parts import CONTEXT, Part, published_bytes, total_of
from rl_vlm.models.memory.placement import place
from rl_vlm.models.memory.shape import ModelShape, text

_NEVER_LEFT = 0.02  # of a card: what the caching allocator of torch cannot hand out, an estimate


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
    samples: int  # of mean length, that all replicas run at once


def plan_memory(
    config: CommonConfig, shape: ModelShape, card: int | None, teacher: ModelShape | None = None
) -> MemoryPlan:
    """The plan for GPUs of `card` bytes each."""
    parts = {"replica": replica_parts(config, shape, card), "learner": learner_parts(config, shape, card)}
    if teacher is not None:
        assert isinstance(config, PolicyConfig)
        parts["teacher"] = replica_parts(config.served_teacher, teacher, card)
    placed = place(config)
    starved = _starved(config, shape, card) if placed else ""
    if not placed:  # no process has a CUDA context, and the size of a GPU means nothing
        card = None
        parts = {kind: [part for part in held if part != CONTEXT] for kind, held in parts.items()}
    keys = total_of(part for part in parts["replica"] if part.name == KV)
    samples = config.serving.num_replicas * samples_at_once(config, shape, keys) if config.serves else 0
    cards: list[Card] = []
    for kinds, same in itertools.groupby(placed or [[kind for kind in parts if config.serves or kind == "learner"]]):
        processes = [Process(kind, total_of(parts[kind]), parts[kind]) for kind in kinds]
        used = sum(process.bytes for process in processes)
        turns = bool(placed) and config.takes_turns and set(kinds) == {"replica", "learner"}
        if turns:
            used -= min(keys, total_of(part for part in parts["learner"] if part.name in OF_UPDATES))
        left = None if card is None else int(card * (1 - _NEVER_LEFT)) - used
        cards.append(Card(len(list(same)), card, used, left, turns, processes))
    fits = not starved and all(one.left is None or one.left >= 0 for one in cards)
    return MemoryPlan(fits, starved, published_bytes(config, shape), len(placed), shape.parameters, cards, samples)


def _starved(config: CommonConfig, shape: ModelShape, card: int | None) -> str:
    """A sentence where vLLM's share of a GPU leaves no room for one sample, else nothing."""
    serving = config.serving
    on_vllm = config.serves and serving.gpus_per_replica and serving.expected_engine == "vllm"
    if card is None or not on_vllm or (size := vllm_kv(config, shape, card)) >= sample_bytes(config, shape):
        return ""
    advice = "use a larger GPU"
    if not config.takes_turns:
        advice = f"raise serving.vllm.gpu_memory_utilization ({serving.memory_utilization:g}), or {advice}"
    return (
        f"A replica has {text(size)} of the GPU for keys and values, and one sample of serving.max_context "
        f"{serving.max_context} takes {text(sample_bytes(config, shape))}: {advice}."
    )
