"""Held-out evaluation through the env runners: its tasks and its metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rl_vlm.config import RunConfig
from rl_vlm.rollout.env_metrics import env_figures
from rl_vlm.rollout.tasks import RolloutTask, View
from rl_vlm.seeding import derive_seed
from rl_vlm.statistics import mean_interval, pass_at_k, wilson_interval
from rl_vlm.types import Trajectory, TrajectoryGroup


def evaluation_tasks(run: RunConfig, num_items: int | None, min_version: int) -> list[RolloutTask]:
    """One greedy episode per item and variant; with `evaluation.samples` above 1 also a group of sampled ones."""
    evaluation = run.evaluation
    count = _count(run, num_items)
    kinds = [("greedy", 1, 0.0)]
    if evaluation.samples > 1:
        kinds.append(("sampled", evaluation.samples, run.rollout.temperature))
    return [
        RolloutTask(
            group_id=f"{variant}/{kind}/{index:06d}",
            index=index,
            split=evaluation.split,
            seed=derive_seed(run.seed, 4, index),
            sampling_seed=derive_seed(run.seed, 5, index),
            size=size,
            temperature=temperature,
            min_version=min_version,
            variant=variant,
        )
        for variant in evaluation.variants
        for kind, size, temperature in kinds
        for index in range(count)
    ]


def viewed_tasks(tasks: Sequence[RolloutTask], view: View, limit: int | None = None) -> list[RolloutTask]:
    """The greedy tasks of the first variant once more, with other images; at most `limit` of them."""
    greedy = [task for task in tasks if task.variant == tasks[0].variant and task.temperature == 0][:limit]
    others = [task.index for task in greedy[1:] + greedy[:1]]
    return [
        replace(task, group_id=f"{task.group_id}/{view}", view=view, other_index=other)
        for task, other in zip(greedy, others, strict=True)
    ]


def _count(run: RunConfig, num_items: int | None) -> int:
    return min(run.evaluation.num_items, num_items) if num_items is not None else run.evaluation.num_items


def is_correct(trajectory: Trajectory) -> bool:
    """The environment's `correct` of the info; without it, whether the reward is at least 1."""
    correct = trajectory.info.get("correct")
    return bool(correct) if correct is not None else trajectory.reward >= 1.0


def summarize(
    run: RunConfig,
    tasks: Sequence[RolloutTask],
    groups: Sequence[TrajectoryGroup],
    metrics: Mapping[str, tuple[float, ...]] | None = None,
) -> dict[str, Any]:
    """Accuracy with its 95 % interval and mean reward per variant; a lost episode counts as wrong.

    Keys: `accuracy/<variant>`, `accuracy_low/<variant>`, `accuracy_high/<variant>`, `reward/<variant>`,
    `items/<variant>`, `pass@k/<variant>` for k = 1, 2, 4, ... up to the samples, and `env/<name>/<variant>` for the
    `metrics` that the environment declares, over the greedy episodes that were not lost.
    """
    found = {group.group_id: group for group in groups}
    results: dict[str, Any] = {}
    for variant in run.evaluation.variants:
        greedy = [task for task in tasks if task.variant == variant and task.temperature == 0 and task.view == "true"]
        answered = [found[task.group_id].trajectories[0] for task in greedy if task.group_id in found]
        right = sum(is_correct(trajectory) for trajectory in answered)
        low, high = wilson_interval(right, len(greedy))
        results |= {
            f"accuracy/{variant}": right / max(len(greedy), 1),
            f"accuracy_low/{variant}": low,
            f"accuracy_high/{variant}": high,
            f"reward/{variant}": sum(trajectory.reward for trajectory in answered) / max(len(greedy), 1),
            f"turns/{variant}": float(np.mean([len(t.turns) for t in answered])) if answered else 0.0,
            f"items/{variant}": len(greedy),
            **{f"{name}/{variant}": value for name, value in env_figures(metrics or {}, answered).items()},
        }
        sampled = [task for task in tasks if task.variant == variant and task.temperature > 0]
        if sampled:
            counts = [
                sum(map(is_correct, found[task.group_id].trajectories)) if task.group_id in found else 0
                for task in sampled
            ]
            k = 1
            while k <= run.evaluation.samples:
                results[f"pass@{k}/{variant}"] = pass_at_k(np.array(counts), run.evaluation.samples, k)
                k *= 2
    return results | _without_sight(tasks, found)


def _without_sight(tasks: Sequence[RolloutTask], found: dict[str, TrajectoryGroup]) -> dict[str, float]:
    """Accuracy where other images were shown, `sight/accuracy_<view>`, and how much the true ones gain on the same items.

    `sight/accuracy_gap` is that gain over blank images, `sight/accuracy_gap_low` and `_high` its 95 % interval.
    """

    def right(group_id: str) -> bool:
        return group_id in found and is_correct(found[group_id].trajectories[0])

    results: dict[str, float] = {}
    for view in ("blank", "swapped"):
        viewed = [task for task in tasks if task.view == view]
        if not viewed:
            continue
        seen = np.array([right(task.group_id.removesuffix(f"/{view}")) for task in viewed], dtype=float)
        unseen = np.array([right(task.group_id) for task in viewed], dtype=float)
        results[f"sight/accuracy_{view}"] = float(unseen.mean())
        if view == "blank":
            low, high = mean_interval(seen - unseen)
            results |= {
                "sight/accuracy_gap": float((seen - unseen).mean()),
                "sight/accuracy_gap_low": low,
                "sight/accuracy_gap_high": high,
            }
    return results
