"""What learners tell the driver before an update (Scores), and what it tells them then (Targets). No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


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
class Targets:
    """Advantages float32 [T] and, with a critic, normalised returns by trajectory id; the value weight of each step."""

    advantages: dict[str, np.ndarray]
    returns: dict[str, np.ndarray]
    value_weights: list[float]
