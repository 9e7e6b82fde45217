"""Recent solve rates of tasks, and draws of tasks by them: those near one half first, because they have a gradient.

With n episodes of a task of which s were solved, and a prior of m episodes of which half were, its rate is
p = (s + m / 2) / (n + m) and its weight floor + (1 - floor) · 4 p (1 - p): 1 at one half, `floor` where all or none is solved. The
variance p (1 - p) of a 0/1 reward is what a group's advantages are made of (prioritised sampling by it: SPEED-RL, arXiv 2506.09016).
Older episodes count less: half after `half_life` further episodes of the same task. A task whose last group was lost has the weight
`floor`: nothing can be learned from an item that cannot be played.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rl_vlm.config import CurriculumSection
from rl_vlm.types import UserInputError

MAX_KNOWN = (
    65_536  # tasks whose episodes are remembered; of more, those without episodes for the longest time are forgotten
)


class SolveRates:
    """The recent solve rates of tasks by key; a key without episodes has the rate of the prior, one half."""

    def __init__(self, settings: CurriculumSection) -> None:
        self._prior, self._floor, self._half_life = settings.prior, settings.floor, settings.half_life
        self._counts: dict[str, tuple[float, float]] = {}  # key -> (episodes, solved), both faded; least recent first
        self._lost: set[str] = set()  # keys of `_counts` whose last group was lost

    def observe(self, key: str, episodes: int, solved: int) -> None:
        """Add the episodes of one group."""
        before, solved_before = self._counts.pop(key, (0.0, 0.0))
        fade = 0.5 ** (episodes / self._half_life)
        self._set(key, (before * fade + episodes, solved_before * fade + solved))
        self._lost.discard(key)

    def lose(self, key: str) -> None:
        """A group of this task was lost: its weight is `floor` until another one is complete."""
        self._set(key, self._counts.pop(key, (0.0, 0.0)))
        self._lost.add(key)

    def _set(self, key: str, counts: tuple[float, float]) -> None:
        self._counts[key] = counts
        if len(self._counts) > MAX_KNOWN:
            oldest = next(iter(self._counts))
            del self._counts[oldest]
            self._lost.discard(oldest)

    def known(self) -> list[str]:
        """The keys that were tried."""
        return list(self._counts)

    def rate(self, key: str) -> float:
        """The recent solve rate."""
        episodes, solved = self._counts.get(key, (0.0, 0.0))
        return (solved + self._prior / 2) / (episodes + self._prior)

    def weight(self, key: str) -> float:
        """From `floor` to 1."""
        if key in self._lost:
            return self._floor
        rate = self.rate(key)
        return self._floor + (1 - self._floor) * 4 * rate * (1 - rate)

    def forget(self) -> None:
        """Forget all episodes."""
        self._counts.clear()
        self._lost.clear()

    def state(self) -> list[list[Any]]:
        """What `restore` needs, in JSON's types."""
        return [[key, *counts, key in self._lost] for key, counts in self._counts.items()]

    def restore(self, state: list[list[Any]]) -> None:
        """Go back to a saved state."""
        self._counts = {str(key): (float(episodes), float(solved)) for key, episodes, solved, *_ in state}
        # Earlier checkpoints do not say what was lost.
        self._lost = {str(key) for key, _, _, *lost in state if any(lost)}


class SolveRateItems:
    """Draws indices of a split by the weights of their solve rates, with replacement.

    An index that was never sampled has the largest weight, so a split that is larger than the run is mostly seen once; nothing
    starves. Works in the number of known indices, not in the size of the split.

    Args:
        num_items: size of the split.
        seed: of the draws.
        settings: prior, floor and half-life.
    """

    def __init__(self, num_items: int, seed: int, settings: CurriculumSection) -> None:
        self.rates = SolveRates(settings)
        self._num_items, self._seed = num_items, seed
        self._drawn = 0

    def take(self, count: int) -> list[int]:
        """The next indices."""
        known = [int(key) for key in self.rates.known()]
        weights = np.array([self.rates.weight(str(index)) for index in known])
        unknown = (self._num_items - len(known)) * self.rates.weight("")
        return [self._draw(known, set(known), weights.cumsum(), unknown) for _ in range(count)]

    def _draw(self, known: list[int], seen: set[int], cumulative: np.ndarray, unknown: float) -> int:
        rng = np.random.default_rng([self._seed, self._drawn])
        self._drawn += 1
        total = float(cumulative[-1]) if known else 0.0
        place = rng.random() * (total + unknown)
        if place < total:
            return known[int(np.searchsorted(cumulative, place, side="right"))]
        # The place-th index that is not known: few draws find one while most are unknown, a list where few are.
        if 2 * len(known) < self._num_items:
            while (index := int(rng.integers(self._num_items))) in seen:
                pass
            return index
        rest = [index for index in range(self._num_items) if index not in seen] or known
        return rest[int(rng.integers(len(rest)))]

    def state(self) -> dict[str, Any]:
        """What `restore` needs."""
        return {"drawn": self._drawn, "rates": self.rates.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a saved state. Raises UserInputError when the data have become fewer than the items that it knows."""
        last = max((int(key) for key, *_ in state["rates"]), default=-1)
        if last >= self._num_items:
            raise UserInputError(
                f"The checkpoint has the solve rate of item {last} and the data have {self._num_items} items: resume with the data "
                "that the run began with."
            )
        self._drawn = int(state["drawn"])
        self.rates.restore(state["rates"])
