"""TaskSource: the seam that decides which task instances come next. The driver owns it, so a resumed run goes on with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from rl_vlm.types import TrajectoryGroup


@dataclass(frozen=True, slots=True)
class TaskItem:
    """One task instance of the training split: its index there, and the seed of its environments."""

    index: int
    seed: int


class TaskSource(Protocol):
    """Gives task instances, and may learn from how they went."""

    def take(self, count: int) -> list[TaskItem]:
        """The next `count` instances."""
        ...

    def observe(self, groups: Sequence[TrajectoryGroup]) -> None:
        """What was sampled for instances taken before, each group once."""
        ...

    def state(self) -> dict[str, Any]:
        """What `restore` needs, in JSON's types."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a saved state. Raises UserInputError where it does not fit."""
        ...
