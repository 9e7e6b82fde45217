"""TaskSource: decides which task instances come next. It is part of the driver's checkpoint, so a resumed run continues with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.types import TrajectoryGroup


@dataclass(frozen=True, slots=True)
class TaskItem:
    """One task instance of the training split: its index there, and the seed of its environments.

    `env` is the environment's name in a mixture; `arguments` change its arguments, as the curriculum's `stage` says.
    """

    index: int
    seed: int
    env: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    stage: int = 0


class TaskSource(Protocol):
    """Returns task instances, and may adapt to their results."""

    def begin(self, iteration: int) -> None:
        """Instances that are taken from now on are for the learner after `iteration` steps."""
        ...

    def take(self, count: int) -> list[TaskItem]:
        """The next `count` instances."""
        ...

    def observe(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Note the groups that were sampled for earlier instances, each once."""
        ...

    def lose(self, tasks: Sequence[RolloutTask]) -> None:
        """Note the tasks whose groups were lost after all their attempts."""
        ...

    def figures(self) -> dict[str, float]:
        """Figures of where it stands, by metric name."""
        ...

    def state(self) -> dict[str, Any]:
        """What `restore` needs, in JSON's types."""
        ...

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a saved state. Raises UserInputError where it does not fit."""
        ...
