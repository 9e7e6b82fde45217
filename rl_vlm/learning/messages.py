"""What the driver and the learners send each other in an update. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rl_vlm.learning.batching import Minibatch
from rl_vlm.learning.returns import Rescaling
from rl_vlm.learning.stats import UpdateStats
from rl_vlm.models.payload import WeightPayload
from rl_vlm.tracing import Span


@dataclass(slots=True)
class ScoreBatch:
    """One learner's minibatches, to be answered with `Scores`. An object of its own, because RLlib takes lists apart."""

    minibatches: list[Minibatch]


@dataclass(slots=True)
class Scores:
    """What the learners know before an update, by trajectory id and sampled token: float32 [T].

    log_ratio: log-probability minus that of the base model, where a KL penalty needs it. values: the critic's, normalised.
    """

    log_ratio: dict[str, np.ndarray] = field(default_factory=dict)
    values: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def merge(cls, parts: Sequence[Scores]) -> Scores:
        """The scores of all learners together."""
        merged = cls()
        for part in parts:
            merged.log_ratio |= part.log_ratio
            merged.values |= part.values
        return merged


@dataclass(slots=True)
class UpdateBatch:
    """One learner's share of one update: its part of every optimiser step, and what all learners agree on.

    `minibatches` is empty where those are meant that the learner has scored last. advantages, returns: float32 [T] by trajectory id;
    returns are normalised, and empty without a critic. value_weights: of each step, of the loss of a token that has a return.
    """

    minibatches: list[Minibatch]
    active: list[bool]  # by step: whether any learner has samples
    advantages: dict[str, np.ndarray]
    returns: dict[str, np.ndarray]
    value_weights: list[float]
    rescaling: Rescaling | None = None  # of the critic's normalisation
    epochs: int = 1
    learn_policy: bool = True
    lr_factor: float = 1.0  # of the schedule
    version: int = 1  # of the adapter that the update makes
    trace: str = ""  # the span that the update belongs to


@dataclass(slots=True)
class UpdateResult:
    """What a learner answers to an UpdateBatch. Learner 0 adds the new adapter."""

    stats: UpdateStats
    adapter: WeightPayload | None = None
    spans: list[Span] = field(default_factory=list)  # of an update that is traced
