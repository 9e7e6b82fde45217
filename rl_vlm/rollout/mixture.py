"""Which task instances come next: from one or several environments, by weight and by how often they were solved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.seeding import derive_seed
from rl_vlm.types import TrajectoryGroup, UserInputError

_ENDLESS = 2**31 - 1
_PRIOR, _FLOOR, _HALF_LIFE = 2.0, 0.1, 64.0
# Tasks whose episodes are remembered; of more, those without episodes for the longest time are forgotten.
_MAX_KNOWN = 65_536


class DataCursor:
    """Draws the indices of a split in a new order each epoch; without `num_items` they have no end."""

    def __init__(self, num_items: int | None, seed: int) -> None:
        if num_items is not None and num_items < 1:
            raise UserInputError("The environment's training split is empty: check env.data.")
        self._num_items, self._seed = num_items, seed
        self._epoch = self._position = 0
        self._order = self._shuffled()

    def _shuffled(self) -> np.ndarray:
        return np.random.default_rng([self._seed, self._epoch]).permutation(self._num_items or 0)

    def take(self, count: int) -> list[int]:
        taken: list[int] = []
        while len(taken) < count:
            if self._num_items is None:
                taken.append(derive_seed(self._seed, self._position) % _ENDLESS)
            elif self._position < self._num_items:
                taken.append(int(self._order[self._position]))
            else:
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._shuffled()
                continue
            self._position += 1
        return taken

    def state(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "position": self._position}

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a saved place. Raises UserInputError when the data have become fewer than that."""
        if self._num_items is not None and int(state["position"]) > self._num_items:
            raise UserInputError(
                f"The checkpoint stopped at item {state['position']} of its epoch and the data have {self._num_items} "
                "items: resume with the data that the run began with."
            )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._shuffled()


class SolveRates:
    """The recent solve rates of tasks by key, and their weights in draws: tasks near one half come first.

    With n episodes of a task of which s were solved, and a prior of m episodes of which half were, its rate is
    p = (s + m / 2) / (n + m) and its weight floor + (1 - floor) · 4 p (1 - p): 1 at one half, `floor` where all or none
    is solved. The variance p (1 - p) of a 0/1 reward is what a group's advantages are made of (prioritised sampling by
    it: SPEED-RL, arXiv 2506.09016). Older episodes count less: half after a half-life of episodes of the same task.
    """

    def __init__(self) -> None:
        self._counts: dict[str, tuple[float, float]] = {}  # key -> (episodes, solved), both faded; least recent first

    def observe(self, key: str, episodes: int, solved: int) -> None:
        before, solved_before = self._counts.pop(key, (0.0, 0.0))
        fade = 0.5 ** (episodes / _HALF_LIFE)
        self._counts[key] = before * fade + episodes, solved_before * fade + solved
        if len(self._counts) > _MAX_KNOWN:
            del self._counts[next(iter(self._counts))]

    def known(self) -> list[str]:
        return list(self._counts)

    def rate(self, key: str) -> float:
        """The recent solve rate; of a key without episodes one half."""
        episodes, solved = self._counts.get(key, (0.0, 0.0))
        return (solved + _PRIOR / 2) / (episodes + _PRIOR)

    def weight(self, key: str) -> float:
        """From `_FLOOR` to 1."""
        rate = self.rate(key)
        return _FLOOR + (1 - _FLOOR) * 4 * rate * (1 - rate)

    def forget(self) -> None:
        self._counts.clear()

    def state(self) -> list[list[Any]]:
        return [[key, *counts] for key, counts in self._counts.items()]

    def restore(self, state: list[list[Any]]) -> None:
        self._counts = {str(key): (float(episodes), float(solved)) for key, episodes, solved in state}


class SolveRateItems:
    """Draws indices of a split by the weights of their solve rates, with replacement.

    An index that was never sampled has the largest weight, so a split that is larger than the run is mostly seen once;
    nothing starves. The time depends on the number of known indices, not on the size of the split.
    """

    def __init__(self, num_items: int, seed: int) -> None:
        self.rates = SolveRates()
        self._num_items, self._seed = num_items, seed
        self._drawn = 0

    def take(self, count: int) -> list[int]:
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
        return {"drawn": self._drawn, "rates": self.rates.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a saved state. Raises UserInputError when the data are fewer than the items that it knows."""
        last = max((int(key) for key, *_ in state["rates"]), default=-1)
        if last >= self._num_items:
            raise UserInputError(
                f"The checkpoint has the solve rate of item {last} and the data have {self._num_items} items: resume "
                "with the data that the run began with."
            )
        self._drawn = int(state["drawn"])
        self.rates.restore(state["rates"])


@dataclass(frozen=True, slots=True)
class TaskItem:
    """One task instance of the training split; `seed` is that of its environments, the same whenever it comes."""

    index: int
    seed: int
    env: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    stage: int = 0


class Mixture:
    """Takes tasks from environments in turn, so that after any number of tasks each has had its share to within one
    task. A run with one environment, which has the empty name, is a mixture of one.

    In each turn every environment earns its share of the weights; the one with the largest balance is taken and loses
    one ("smooth weighted round robin", as in nginx). So a small batch holds all environments, and nothing is drawn that
    a resume must repeat. With `by_rate` an environment's weight is multiplied by that of its recent solve rate, and its
    items are drawn likewise; items without end (size None) are not drawn twice, so they have no rate.
    """

    def __init__(self, weights: Mapping[str, float], sizes: Mapping[str, int | None], seed: int, by_rate: bool) -> None:
        self.weights = dict(weights)
        self._by_rate = by_rate
        self._balance = dict.fromkeys(weights, 0.0)
        self._rates = SolveRates()
        self._items: dict[str, DataCursor | SolveRateItems] = {}
        self._seeds: dict[str, int] = {}
        for place, name in enumerate(weights):
            self._seeds[name] = own = derive_seed(seed, 20, place) if name else seed
            size = sizes[name]
            self._items[name] = SolveRateItems(size, own) if by_rate and size else DataCursor(size, own)
        self._taken: Counter[str] = Counter()

    def begin(self, iteration: int) -> None:
        """Tasks that are taken from now on are for the learner after `iteration` steps."""

    def take(self, count: int) -> list[TaskItem]:
        order = [self._next_name() for _ in range(count)]
        self._taken.update(order)
        drawn = {name: iter(self._draw(name, number)) for name, number in Counter(order).items()}
        return [next(drawn[name]) for name in order]

    def _next_name(self) -> str:
        shares = self._shares()
        for name, share in shares.items():
            self._balance[name] += share
        chosen = max((name for name, share in shares.items() if share), key=lambda name: self._balance[name])
        self._balance[chosen] -= 1.0
        return chosen

    def _shares(self) -> dict[str, float]:
        earned = {
            name: weight * (self._rates.weight(name) if self._by_rate else 1.0) for name, weight in self.weights.items()
        }
        total = sum(earned.values())
        return {name: value / total for name, value in earned.items()}

    def _draw(self, name: str, count: int) -> list[TaskItem]:
        indices = self._items[name].take(count)
        return [TaskItem(index, derive_seed(self._seeds[name], 2, index), name) for index in indices]

    def observe(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Note which tasks were solved. Each group is noted once."""
        for group in groups:
            solved = sum(trajectory.correct for trajectory in group.trajectories)
            self._rates.observe(group.env, len(group), solved)
            self._observe_item(group.env, group.index, len(group), solved)

    def lose(self, tasks: Sequence[RolloutTask]) -> None:
        """These tasks were lost after all attempts. It counts as if none of their episodes was solved: nothing can be
        learned from an item that cannot be played."""
        for task in tasks:
            self._observe_item(task.env, task.index, task.size, 0)

    def _observe_item(self, env: str, index: int, episodes: int, solved: int) -> None:
        items = self._items[env]
        if isinstance(items, SolveRateItems):
            items.rates.observe(str(index), episodes, solved)

    def forget_rates(self) -> None:
        """Forget what was solved: the tasks have changed."""
        self._rates.forget()
        for items in self._items.values():
            if isinstance(items, SolveRateItems):
                items.rates.forget()

    def metrics(self) -> dict[str, float]:
        """Of a mixture: tasks handed out, share and recent solve rate of each environment."""
        if "" in self.weights:
            return {}
        shares = self._shares()
        return {
            **{f"mixture/taken/{name}": float(self._taken[name]) for name in self.weights},
            **{f"mixture/share/{name}": share for name, share in shares.items()},
            **{f"mixture/solve_rate/{name}": self._rates.rate(name) for name in self.weights},
        }

    def state(self) -> dict[str, Any]:
        return {
            "balance": dict(self._balance),
            "taken": dict(self._taken),
            "rates": self._rates.state(),
            "items": {name: items.state() for name, items in self._items.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a saved state; the weights stay those of the configuration, which may have changed. Raises
        UserInputError where the environments or the sampling are others."""
        saved = state.get("items", {})
        kinds = {name: "rates" in inner for name, inner in saved.items()}
        if kinds != {name: isinstance(items, SolveRateItems) for name, items in self._items.items()}:
            raise UserInputError(
                f"The checkpoint has tasks of {', '.join(saved) or 'another kind of run'}, drawn in another way: "
                "resume with the env.mixture, curriculum.stages and curriculum.sampling that the run began with."
            )
        self._balance = {str(name): float(balance) for name, balance in state["balance"].items()}
        self._taken = Counter({str(name): int(count) for name, count in state["taken"].items()})
        self._rates.restore(state["rates"])
        for name, items in self._items.items():
            items.restore(saved[name])
