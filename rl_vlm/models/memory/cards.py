"""Which actors of a run share a GPU, and what is left of its memory: the memory plan."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from rl_vlm.config import CommonConfig, PolicyConfig
from rl_vlm.models.memory.needs import (
    KV,
    OF_UPDATES,
    learner_parts,
    preference_learner_parts,
    replica_parts,
    starved_replica,
)
from rl_vlm.models.memory.shape import CUDA_CONTEXT, ELEMENT, GIB, ModelShape, Part

_NEVER_LEFT = 0.02  # of a card: what the caching allocator of torch cannot hand out, an estimate


@dataclass(frozen=True, slots=True)
class Process:
    """A process on a GPU, and its parts there."""

    kind: str
    parts: tuple[Part, ...]

    @property
    def bytes(self) -> int:
        """The sum of all parts."""
        return sum(part.bytes for part in self.parts)

    def as_dict(self) -> dict[str, Any]:
        """See MemoryPlan."""
        return {"kind": self.kind, "bytes": self.bytes, "parts": [part._asdict() for part in self.parts]}


@dataclass(slots=True)
class Card:
    """A GPU of a run; `count` of them hold the same. `size`: bytes that it reports, None where that is not known.
    `turns`: keys and values of the replica and what the learner needs for an update are never there at the same time.
    """

    processes: list[Process] = field(default_factory=list)
    size: int | None = None
    count: int = 1
    turns: bool = False

    @property
    def used(self) -> int:
        """The most that the processes hold together."""
        together = sum(process.bytes for process in self.processes)
        if not self.turns:
            return together
        return together - min(self._held("replica", (KV,)), self._held("learner", OF_UPDATES))

    def _held(self, kind: str, names: Collection[str]) -> int:
        return sum(
            part.bytes
            for process in self.processes
            if process.kind == kind
            for part in process.parts
            if part.name in names
        )

    @property
    def left(self) -> int | None:
        """Bytes that are free beside the processes and the allocator's loss; negative where they do not fit."""
        return None if self.size is None else int(self.size * (1 - _NEVER_LEFT)) - self.used


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The GPUs of a run. Without GPUs one card stands for the machine's memory, and `gpus` is 0."""

    shape: ModelShape
    cards: list[Card]
    gpus: int
    adapter_bytes: int  # of one published version: an adapter in float32, or all weights in the model's precision
    full: bool = False  # whether versions are all weights
    starved: str = ""  # a sentence where a replica's share of a GPU holds no sample

    @property
    def fits(self) -> bool:
        """Whether nothing is known not to fit."""
        return not self.starved and all(card.left is None or card.left >= 0 for card in self.cards)

    def as_dict(self) -> dict[str, Any]:
        """For `rl-vlm plan --json`: sizes in bytes."""
        return {
            "fits": self.fits,
            "starved": self.starved,
            "parameters": self.shape.parameters,
            "adapter_bytes": self.adapter_bytes,
            "gpus": self.gpus,
            "cards": [
                {name: getattr(card, name) for name in ("count", "size", "used", "left", "turns")}
                | {"processes": [process.as_dict() for process in card.processes]}
                for card in self.cards
            ],
        }


def plan_memory(config: CommonConfig, shape: ModelShape, card: int | None) -> MemoryPlan:
    """The plan for GPUs of `card` bytes each."""
    learner = learner_parts(config, shape) if isinstance(config, PolicyConfig) else preference_learner_parts()
    kinds = {
        "replica": Process("replica", tuple(replica_parts(config, shape, card))),
        "learner": Process("learner", tuple(learner)),
    }
    adapter, full = published_bytes(config, shape), config.trains_full
    placed = [[kinds[kind] for kind in kinds_here] for kinds_here in place(config)]
    if not placed:
        # No process has a CUDA context, and the size of a GPU means nothing.
        host = [
            Process(kind, tuple(part for part in process.parts if part.name != "CUDA context"))
            for kind, process in kinds.items()
            if kind == "learner" or config.serves
        ]
        return MemoryPlan(shape, [Card(host)], 0, adapter, full)
    cards: list[Card] = []
    for processes in placed:
        if cards and cards[-1].processes == processes:
            cards[-1].count += 1
        else:
            turns = config.serving.vllm.rest_while_learning and len(processes) > 1
            cards.append(Card(processes, card, turns=turns))
    serves = any(process.kind == "replica" for processes in placed for process in processes)
    return MemoryPlan(shape, cards, len(placed), adapter, full, starved_replica(config, shape, card) if serves else "")


def published_bytes(config: CommonConfig, shape: ModelShape) -> int:
    """Bytes of one version in the object store; 0 for a run that publishes none."""
    if not isinstance(config, PolicyConfig):
        return 0
    if config.trains_full:
        return shape.parameters * ELEMENT[config.published_dtype]
    return 4 * shape.lora_parameters(config.model.lora.rank, config.model.lora.target_modules)


def place(config: CommonConfig) -> list[list[str]]:
    """The kinds of processes on each GPU, as Ray places them on one node: replicas first, each where it first fits."""
    free: list[float] = []
    placed: list[list[str]] = []
    for kind, share in _requests(config):
        if share >= 1:
            free += [0.0] * int(share)
            placed += [[kind] for _ in range(int(share))]
            continue
        # Ray fills the GPU that is left with least.
        fitting = [k for k, room in enumerate(free) if room >= share - 1e-9]
        if not fitting:
            free.append(1.0)
            placed.append([])
            fitting = [len(free) - 1]
        chosen = min(fitting, key=lambda k: free[k])
        free[chosen] -= share
        placed[chosen].append(kind)
    return placed


def shares_gpu(config: CommonConfig) -> bool:
    """Whether a replica and a learner are on one GPU."""
    return any(len(set(kinds)) > 1 for kinds in place(config))


def driver_gpu(config: CommonConfig) -> int:
    """The number of the learners' first GPU where Ray gives the replicas the first ones."""
    return next((number for number, kinds in enumerate(place(config)) if "learner" in kinds), 0)


def learner_fraction(config: CommonConfig, card: int) -> float | None:
    """The share of a GPU of `card` bytes that torch may allocate in a learner; None: no limit, it has the GPU to
    itself.

    Beside one replica of vLLM that is all that vLLM leaves; else the share that Ray was told. CUDA contexts come on
    top.
    """
    share = config.learner.gpus_per_learner
    here = next((kinds for kinds in place(config) if "learner" in kinds), ["learner"])
    if len(here) == 1 or not 0 < share < 1:
        return None
    if config.serving.vllm.rest_while_learning:
        return None  # the replica allocates nothing while the learner does
    if here.count("learner") == 1 and here.count("replica") == 1 and config.serving.expected_engine == "vllm":
        share = max(share, 1 - config.serving.memory_utilization)
    return max(share - CUDA_CONTEXT / card, 0.05)


def _requests(config: CommonConfig) -> Iterator[tuple[str, float]]:
    """Kind and GPUs of every process that asks for some, replicas first."""
    kinds = {"replicas": "replica", "learners": "learner", "learner in the driver": "learner"}
    for actors in config.actors:
        if actors.gpus and actors.kind in kinds:
            for _ in range(actors.count):
                yield kinds[actors.kind], actors.gpus


def gib(size: float) -> int:
    """GiB as bytes."""
    return int(size * GIB)
