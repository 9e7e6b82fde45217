"""The scale of returns, by which a critic's values are normalised (PopArt)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rl_vlm.statistics import are_equal


@dataclass(frozen=True, slots=True)
class Rescaling:
    """A change of normalisation: a normalised value v becomes factor · v + shift and means the same return."""

    factor: float = 1.0
    shift: float = 0.0


@dataclass(frozen=True, slots=True)
class ReturnScale:
    """Running mean and mean square of returns, exponentially weighted and without the bias of the start."""

    mean_sum: float = 0.0
    square_sum: float = 0.0
    weight: float = 0.0

    _DECAY = 0.9  # per iteration
    _LEAST_STD = 1e-2

    @property
    def mean(self) -> float:
        return self.mean_sum / self.weight if self.weight else 0.0

    @property
    def std(self) -> float:
        """The standard deviation, bounded below so that equal returns do not blow up."""
        if not self.weight:
            return 1.0
        return max(max(self.square_sum / self.weight - self.mean**2, 0.0) ** 0.5, self._LEAST_STD)

    def observe(self, returns: np.ndarray) -> ReturnScale:
        """With the finite returns of another iteration."""
        seen = returns[np.isfinite(returns)].astype(np.float64)
        if not len(seen):
            return self
        keep, add = self._DECAY, 1 - self._DECAY
        mean, square = float(seen.mean()), float((seen**2).mean())
        before = (self.mean_sum, self.square_sum, self.weight)
        return ReturnScale(*(keep * old + add * new for old, new in zip(before, (mean, square, 1.0), strict=True)))

    def rescaling_to(self, new: ReturnScale) -> Rescaling:
        """The change of normalisation to a new scale. Without returns so far a value of 0 meant the mean return,
        whatever that is, and stays."""
        if not self.weight:
            return Rescaling()
        return Rescaling(self.std / new.std, (self.mean - new.mean) / new.std)


def explained_variance(values: np.ndarray, returns: np.ndarray) -> float:
    """1 - Var(R - V) / Var(R) over the tokens that have a return; 0 where all returns are equal."""
    known = np.isfinite(returns)
    if are_equal(returns[known]):
        return 0.0
    return 1.0 - float(np.var(returns[known] - values[known])) / float(np.var(returns[known]))
