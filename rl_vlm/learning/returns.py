"""The normalisation of returns that a critic learns, and how well it explains them. No torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rl_vlm.statistics import are_equal


@dataclass(frozen=True, slots=True)
class Rescaling:
    """A change of normalisation: a normalised value v becomes factor · v + shift and means the same return."""

    factor: float = 1.0
    shift: float = 0.0


@dataclass(frozen=True, slots=True)
class ReturnScale:
    """Running mean and mean square of returns, exponentially weighted and without the bias of the start.

    Part of the driver's checkpoint. With `weight` 0 nothing has been seen: mean 0, standard deviation 1.
    """

    mean_sum: float = 0.0
    square_sum: float = 0.0
    weight: float = 0.0

    _DECAY = 0.9  # per iteration
    _LEAST_STD = 1e-2

    @property
    def mean(self) -> float:
        """The mean return."""
        return self.mean_sum / self.weight if self.weight else 0.0

    @property
    def std(self) -> float:
        """The standard deviation, bounded below so that equal returns do not blow up."""
        if not self.weight:
            return 1.0
        return max(max(self.square_sum / self.weight - self.mean**2, 0.0) ** 0.5, self._LEAST_STD)

    def observe(self, returns: np.ndarray) -> ReturnScale:
        """With the finite ones of another iteration's returns."""
        seen = returns[np.isfinite(returns)].astype(np.float64)
        if not len(seen):
            return self
        keep = self._DECAY
        return replace(
            self,
            mean_sum=keep * self.mean_sum + (1 - keep) * float(seen.mean()),
            square_sum=keep * self.square_sum + (1 - keep) * float((seen**2).mean()),
            weight=keep * self.weight + (1 - keep),
        )

    def rescaling_to(self, new: ReturnScale) -> Rescaling:
        """How values that are normalised by this scale are normalised by a new one.

        A critic that has seen no return says 0, which is to mean the mean return whatever that is.
        """
        if not self.weight:
            return Rescaling()
        return Rescaling(self.std / new.std, (self.mean - new.mean) / new.std)


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float:
    """1 - Var(R - V) / Var(R) over the tokens that have a return; 0 where all returns are equal."""
    known = np.isfinite(returns)
    if are_equal(returns[known]):
        return 0.0
    return 1.0 - float(np.var(returns[known] - values[known])) / float(np.var(returns[known]))
