"""Mixture: the tasks that come next, of one or several environments, by weight and, where asked, by their recent solve rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_vlm.config import CurriculumSection
from rl_vlm.rollout.cursor import DataCursor
from rl_vlm.rollout.solve_rate import SolveRateItems, SolveRates
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.seeding import derive_seed
from rl_vlm.types import TrajectoryGroup, UserInputError


@dataclass(frozen=True, slots=True)
class TaskItem:
    """One task instance of the training split: its index there, and the seed of its environments, the same whenever it comes.

    `env` is the environment's name in a mixture; `arguments` change its arguments, as the curriculum's `stage` says.
    """

    index: int
    seed: int
    env: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    stage: int = 0


class Mixture:
    """Takes tasks from environments in turn, so that after any number of tasks each has had its share to within one task.

    A run with one environment is a mixture of one. In each turn every environment earns its share of the weights; the one with the largest balance is taken and pays one ("smooth
    weighted round robin", as in nginx). So a small batch holds all environments, and nothing is drawn that a resume must repeat. With
    `sampling: solve_rate` an environment's weight is multiplied by that of its recent solve rate, and its items are drawn
    likewise; items that are made without end are not drawn twice, so they have no rate.

    Args:
        weights: weight of each environment by name; a single one has the empty name.
        sizes: size of each training split; None for items without end.
        seed: of orders, draws and environments.
        settings: how tasks are drawn.
    """

    def __init__(
        self, weights: Mapping[str, float], sizes: Mapping[str, int | None], seed: int, settings: CurriculumSection
    ) -> None:
        self.weights = dict(weights)
        self._by_rate = settings.sampling == "solve_rate"
        self._balance = dict.fromkeys(weights, 0.0)
        self._rates = SolveRates(settings)
        self._items: dict[str, DataCursor | SolveRateItems] = {}
        self._seeds: dict[str, int] = {}
        for place, name in enumerate(weights):
            self._seeds[name] = own = derive_seed(seed, 20, place) if name else seed
            size = sizes[name]
            if self._by_rate and size is not None and size > 0:
                self._items[name] = SolveRateItems(size, own, settings)
            else:
                self._items[name] = DataCursor(size, own)
        self._taken: Counter[str] = Counter()

    def begin(self, iteration: int) -> None:
        """Tasks that are taken from now on are for the learner after `iteration` steps."""

    def take(self, count: int) -> list[TaskItem]:
        """The next `count` tasks."""
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
        """Note which tasks were solved. Each group is told once."""
        for group in groups:
            solved = sum(trajectory.correct for trajectory in group.trajectories)
            self._rates.observe(group.env, len(group), solved)
            items = self._items[group.env]
            if isinstance(items, SolveRateItems):
                items.rates.observe(str(group.index), len(group), solved)

    def lose(self, tasks: Sequence[RolloutTask]) -> None:
        """Note the tasks whose groups were lost after all attempts: they are drawn no more often than those that are always solved."""
        for task in tasks:
            items = self._items[task.env]
            if isinstance(items, SolveRateItems):
                items.rates.lose(str(task.index))

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
        """What `restore` needs, in JSON's types."""
        return {
            "balance": dict(self._balance),
            "taken": dict(self._taken),
            "rates": self._rates.state(),
            "items": {name: items.state() for name, items in self._items.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a saved state; the weights stay those of the configuration, which may have changed.

        Raises UserInputError where the environments or the sampling are others.
        """
        saved = state.get("items", {})
        kinds = {name: "rates" in inner for name, inner in saved.items()}
        if kinds != {name: isinstance(items, SolveRateItems) for name, items in self._items.items()}:
            raise UserInputError(
                f"The checkpoint has tasks of {', '.join(saved) or 'another kind of run'}, drawn in another way: resume with the "
                "env.mixture, curriculum.stages and curriculum.sampling that the run began with."
            )
        self._balance = {str(name): float(balance) for name, balance in state["balance"].items()}
        self._taken = Counter({str(name): int(count) for name, count in state["taken"].items()})
        self._rates.restore(state["rates"])
        for name, items in self._items.items():
            items.restore(saved[name])
