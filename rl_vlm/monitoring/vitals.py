"""What alerts look at, computed once per iteration: iterations differ in length, so a window of minutes says little."""

from __future__ import annotations

import math

_SMOOTHING = 0.9
_FIRST = 5  # iterations that make the start
_FLOOR = 1e-4  # nats per token: a mismatch below this is nothing


class MovingAverage:
    """An exponential moving average without a bias to zero in its first values."""

    def __init__(self, decay: float = _SMOOTHING) -> None:
        self._decay = decay
        self._sum = self._weight = 0.0

    def add(self, value: float) -> None:
        """Add a value; nan and infinity are ignored."""
        if math.isfinite(value):
            self._sum = self._decay * self._sum + (1 - self._decay) * value
            self._weight = self._decay * self._weight + (1 - self._decay)

    @property
    def value(self) -> float | None:
        """The average, or None before the first value."""
        return self._sum / self._weight if self._weight else None


class Start:
    """The mean of the first values of a figure."""

    def __init__(self) -> None:
        self._first: list[float] = []

    def add(self, value: float) -> bool:
        """Take a value; False once the start is complete and the value belongs to what comes after. nan is ignored."""
        if len(self._first) >= _FIRST:
            return False
        if math.isfinite(value):
            self._first.append(value)
        return True

    @property
    def value(self) -> float | None:
        """The mean, or None before the first value."""
        return sum(self._first) / len(self._first) if self._first else None


class MismatchGrowth:
    """How many times larger mismatch/kl is than at the start.

    The start is the mean of the first five values, or 1e-4 where that is less: in float32 engine and learner agree to 1e-9 or
    better, and ten times as much is still nothing.
    """

    def __init__(self) -> None:
        self._start = Start()

    @property
    def start(self) -> float:
        """The mean of the first values; 0 before them."""
        return self._start.value or 0.0

    def add(self, kl: float) -> float | None:
        """The factor, or None while the start is being measured and for nan."""
        if self._start.add(kl) or not math.isfinite(kl):
            return None
        return kl / max(self.start, _FLOOR)


class RewardTrend:
    """The reward's start, moving average, and the best that this average was since the start."""

    def __init__(self) -> None:
        self._start, self._average = Start(), MovingAverage()
        self._best = -math.inf

    def add(self, reward: float) -> dict[str, float]:
        """`reward_start`, `reward_smoothed` and `reward_best`, those that are known."""
        early = self._start.add(reward)
        self._average.add(reward)
        start, smoothed = self._start.value, self._average.value
        if start is None or smoothed is None:
            return {}
        if not early:  # a lucky first iteration is no peak to fall from
            self._best = max(self._best, smoothed)
        known = {"reward_start": start, "reward_smoothed": smoothed}
        return known if self._best == -math.inf else known | {"reward_best": self._best}
