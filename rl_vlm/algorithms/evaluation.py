"""Plays held-out items during training, on the replicas that sample for it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rl_vlm.config import PolicyConfig
from rl_vlm.evaluation.heldout import evaluation_tasks, viewed_tasks
from rl_vlm.evaluation.outcomes import outcomes_of_groups
from rl_vlm.evaluation.results import losses, summarize
from rl_vlm.rollout.metrics import Metrics
from rl_vlm.rollout.rollouts import Rollouts
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.types import TrajectoryGroup

# Greedy episodes of held-out items, with their conversations.
Items = list[tuple[RolloutTask, TrajectoryGroup]]


@dataclass(frozen=True, slots=True)
class HeldOutItems:
    """The held-out items of a run: `sizes` by environment, played by `rollouts`."""

    config: PolicyConfig
    sizes: Mapping[str, int | None]
    metrics: Mapping[str, Metrics]  # that the environments declare
    rollouts: Rollouts

    def evaluate(self, version: int, *, keep: int = 0, unseen: bool = False) -> tuple[dict[str, Any], Items]:
        """Accuracy per variant and environment (see `summarize`), and the first `keep` items. `unseen`: some items once
        more with blank images, and with those of other items."""
        config, started = self.config, time.perf_counter()
        tasks = evaluation_tasks(config, self.sizes, version)
        if unseen and (repeated := config.sight.blank_items):
            tasks += viewed_tasks(tasks, "blank", repeated) + viewed_tasks(tasks, "swapped", repeated)
        tasks = [replace(task, record=task.index < keep and task.temperature == 0) for task in tasks]
        groups, result = self.rollouts.evaluate(tasks, config.evaluation.timeout_s)
        recorded = {task.group_id: task for task in tasks if task.record}
        results = {
            **summarize(config, tasks, outcomes_of_groups(config, tasks, groups), self.metrics),
            **losses(result.lost),
            "policy_version": version,
            "seconds": time.perf_counter() - started,
        }
        return results, [(recorded[group.group_id], group) for group in groups if group.group_id in recorded]

    def sample(self, version: int, count: int, name: str, **changes: Any) -> list[TrajectoryGroup]:
        """An episode of each of the first `count` items, greedy unless `changes` of the tasks say otherwise; `name` is
        part of their ids."""
        evaluation = self.config.evaluation
        first = next(iter(evaluation.variants.items()))
        asked = evaluation.model_copy(update={"num_items": count, "samples": 1, "variants": dict([first])})
        tasks = evaluation_tasks(self.config.model_copy(update={"evaluation": asked}), self.sizes, version)[:count]
        tasks = [replace(task, group_id=f"{name}/{task.group_id}", **changes) for task in tasks]
        groups, _ = self.rollouts.evaluate(tasks, evaluation.timeout_s)
        return sorted(groups, key=lambda group: group.group_id)
