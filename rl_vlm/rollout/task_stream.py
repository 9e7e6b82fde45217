"""Makes the tasks of a run, in rounds, and repeats what was under way when it was interrupted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from rl_vlm.config import PolicyConfig
from rl_vlm.rollout.mixture import Mixture, TaskItem
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.seeding import derive_seed
from rl_vlm.types import TrajectoryGroup


class TaskStream:
    """Makes tasks, `prompts_per_iteration` to a round, of the instances that `source` gives. A task's round and place
    form its id and the seed of its sampling."""

    def __init__(self, source: Mixture, run: PolicyConfig) -> None:
        self._source, self._run = source, run
        self._next_round = self._next_place = 0
        self._open: dict[str, RolloutTask] = {}  # handed out and not finished, in order
        self._repeated: list[RolloutTask] = []  # handed out before a resume

    def begin(self, iteration: int) -> None:
        self._source.begin(iteration)

    def take(self, count: int) -> list[RolloutTask]:
        """The next `count` tasks. The sender sets `min_version`."""
        tasks, self._repeated = self._repeated[:count], self._repeated[count:]
        for item in self._source.take(count - len(tasks)):
            tasks.append(self._task(self._next_round, self._next_place, item))
            self._next_place += 1
            if self._next_place >= self._run.rollout.prompts_per_iteration:
                self._next_round, self._next_place = self._next_round + 1, 0
        self._open |= {task.group_id: task for task in tasks}
        return tasks

    def _task(self, number: int, place: int, item: TaskItem) -> RolloutTask:
        every = self._run.logging.trajectories_every
        return RolloutTask(
            group_id=f"{number:06d}:{place:05d}",
            split="train",
            sampling_seed=derive_seed(self._run.seed, 3, number, place),
            size=self._run.rollout.group_size,
            temperature=self._run.rollout.temperature,
            min_version=0,
            record=bool(every) and number % every == 0,
            **asdict(item),
        )

    def done_with(self, groups: Sequence[TrajectoryGroup]) -> None:
        """These groups were learned from, replaced or dropped: their tasks are not repeated, and the source learns of
        it. Not earlier: a group that waits for the learner is sampled anew after a resume, and would count twice."""
        self._source.observe(groups)
        for group in groups:
            self._open.pop(group.group_id, None)

    def lose(self, group_ids: Iterable[str]) -> None:
        """These groups were lost: their tasks are not repeated, and the source learns of it."""
        # Sorted: they come in the order in which env runners answered, on which no later draw may depend.
        self._source.lose([self._open.pop(group_id) for group_id in sorted(group_ids) if group_id in self._open])

    def metrics(self) -> dict[str, float]:
        return self._source.metrics()

    def state(self) -> dict[str, Any]:
        """What `restore` needs: the source's place, and the tasks that are under way."""
        return {
            "round": self._next_round,
            "place": self._next_place,
            "source": self._source.state(),
            # A second interruption may come before the tasks of the first are handed out again.
            "open": [asdict(task) for task in (*self._open.values(), *self._repeated)],
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a saved state; its open tasks are handed out first."""
        self._source.restore(state["source"])
        self._next_round, self._next_place = int(state["round"]), int(state["place"])
        rollout = self._run.rollout  # which a resume may have changed; the learner computes with this temperature
        changed = {"size": rollout.group_size, "temperature": rollout.temperature}
        self._repeated = [RolloutTask(**{**fields, **changed}) for fields in state["open"]]
        self._open = {}
