"""TaskSource: decides which task instances come next. It is part of the driver's checkpoint, so a resumed run continues with it."""

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
    """Returns task instances, and may adapt to their results."""

    def take(self, count: int) -> list[TaskItem]:
        """The next `count` instances."""
        ...

    def observe(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Note the groups that were sampled for earlier instances, each once."""
        ...

    def state(self) -> dict[str, Any]:
        """What `restore` needs, in JSON's types."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a saved state. Raises UserInputError where it does not fit."""
        ...
