"""DataCursor: every item of a split once per epoch."""

from __future__ import annotations

from typing import Any

import numpy as np

from rl_vlm.seeding import derive_seed
from rl_vlm.types import UserInputError

_ENDLESS = 2**31 - 1


class DataCursor:
    """Draws the indices of a split in a new order each epoch.

    Args:
        num_items: size of the split, or None when items are made without end from their index.
        seed: of the orders.
    """

    def __init__(self, num_items: int | None, seed: int) -> None:
        if num_items is not None and num_items < 1:
            raise UserInputError("The environment's training split is empty: check env.data.")
        self._num_items, self._seed = num_items, seed
        self._epoch = self._position = 0
        self._order = self._shuffled()

    def _shuffled(self) -> np.ndarray:
        return np.random.default_rng([self._seed, self._epoch]).permutation(self._num_items or 0)

    def take(self, count: int) -> list[int]:
        """The next indices."""
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
        """What `restore` needs."""
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
