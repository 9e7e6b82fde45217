"""The data cursor: every item of a split once per epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rl_vlm.rollout.task_source import TaskItem
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.seeding import derive_seed
from rl_vlm.types import TrajectoryGroup, UserInputError

_ENDLESS = 2**31 - 1


class DataCursor:
    """Returns the items of a split in a new order each epoch; without a size, indices are drawn without end.

    Args:
        num_items: size of the split, or None when items are drawn without end from their index.
        seed: of the orders and of the environments.
    """

    def __init__(self, num_items: int | None, seed: int) -> None:
        if num_items is not None and num_items < 1:
            raise UserInputError("The environment's training split is empty: check env.data.")
        self._num_items = num_items
        self._seed = seed
        self._epoch = 0
        self._position = 0
        self._order = self._shuffled()

    def _shuffled(self) -> np.ndarray | None:
        if self._num_items is None:
            return None
        return np.random.default_rng([self._seed, self._epoch]).permutation(self._num_items)

    def begin(self, iteration: int) -> None:
        """Does nothing: the order does not depend on the iteration."""

    def take(self, count: int) -> list[TaskItem]:
        """The next `count` items. An item has the same seed whenever it comes."""
        return [TaskItem(index, derive_seed(self._seed, 2, index)) for index in self._indices(count)]

    def _indices(self, count: int) -> list[int]:
        taken: list[int] = []
        while len(taken) < count:
            if self._order is None:
                taken.append(derive_seed(self._seed, self._position) % _ENDLESS)
                self._position += 1
                continue
            if self._position == len(self._order):
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._shuffled()
                continue
            taken.append(int(self._order[self._position]))
            self._position += 1
        return taken

    def observe(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Does nothing: the order does not depend on results."""

    def lose(self, tasks: Sequence[RolloutTask]) -> None:
        """Does nothing: the order does not depend on results."""

    def figures(self) -> dict[str, float]:
        """None."""
        return {}

    def state(self) -> dict[str, Any]:
        """What `restore` needs."""
        return {"epoch": self._epoch, "position": self._position}

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a saved place. Raises UserInputError when the data have become fewer than that, or are a mixture's."""
        if "position" not in state:
            raise UserInputError(
                "The checkpoint has a mixture or a curriculum: resume with the configuration that the run began with."
            )
        if self._num_items is not None and int(state["position"]) > self._num_items:
            raise UserInputError(
                f"The checkpoint stopped at item {state['position']} of its epoch and the data have {self._num_items} "
                "items: resume with the data that the run began with."
            )
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._order = self._shuffled()
