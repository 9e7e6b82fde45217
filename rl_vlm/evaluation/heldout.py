"""Held-out evaluation through the env runners: its tasks and its metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from rl_vlm.config import RunConfig
from rl_vlm.rollout.env_metrics import Metrics, declared_metrics
from rl_vlm.rollout.judge_metrics import judge_metrics
from rl_vlm.rollout.tasks import RolloutTask, View
from rl_vlm.seeding import derive_seed
from rl_vlm.statistics import bootstrap_interval, pass_at_k, wilson_interval


class Finished(Protocol):
    """What a summary reads of an episode: a Trajectory, or the Outcome that an evaluation kept of one."""

    @property
    def correct(self) -> bool: ...
    @property
    def reward(self) -> float: ...
    @property
    def num_turns(self) -> int: ...
    @property
    def info(self) -> dict[str, Any]: ...


class FinishedGroup(Protocol):
    """The finished episodes of one task."""

    @property
    def group_id(self) -> str: ...
    @property
    def trajectories(self) -> Sequence[Finished]: ...


def evaluation_tasks(run: RunConfig, sizes: Mapping[str, int | None], min_version: int) -> list[RolloutTask]:
    """One greedy episode per environment, item and variant; with `evaluation.samples` above 1 also a group of sampled ones.

    `sizes` of the split by name of the environment; None for items without end.
    """
    evaluation = run.evaluation
    kinds = [("greedy", 1, 0.0)]
    if evaluation.samples > 1:
        kinds.append(("sampled", evaluation.samples, run.rollout.temperature))
    return [
        RolloutTask(
            group_id=f"{label(env, variant)}/{kind}/{index:06d}",
            index=index,
            split=evaluation.split,
            seed=derive_seed(run.seed, 4, index),
            sampling_seed=derive_seed(run.seed, 5, index),
            size=size,
            temperature=temperature,
            min_version=min_version,
            variant=variant,
            env=env,
        )
        for variant in evaluation.variants
        for kind, size, temperature in kinds
        for index in range(evaluation.num_items)
        for env, num_items in sizes.items()  # in turn, so that the first tasks are of all environments
        if num_items is None or index < num_items
    ]


def viewed_tasks(tasks: Sequence[RolloutTask], view: View, limit: int | None = None) -> list[RolloutTask]:
    """The greedy tasks of the first variant once more, with other images; at most `limit` of them."""
    greedy = [task for task in tasks if task.variant == tasks[0].variant and task.temperature == 0][:limit]
    others: dict[tuple[str, int], int] = {}  # the next item of the same environment
    for env in {task.env for task in greedy}:
        own = [task.index for task in greedy if task.env == env]
        others |= {(env, here): there for here, there in zip(own, own[1:] + own[:1], strict=True)}
    return [
        replace(task, group_id=f"{task.group_id}/{view}", view=view, other_index=others[task.env, task.index])
        for task in greedy
    ]


def label(env: str, variant: str) -> str:
    """The name of an environment's results under a variant: a single one's is the variant, in a mixture its own comes first."""
    if not env:
        return variant
    return env if variant == "default" else f"{env}/{variant}"


def summarize(
    run: RunConfig,
    tasks: Sequence[RolloutTask],
    groups: Sequence[FinishedGroup],
    metrics: Mapping[str, Metrics] | None = None,
) -> dict[str, Any]:
    """Accuracy with its 95 % interval and mean reward per variant; a lost episode counts as wrong.

    Keys: `accuracy/<variant>`, `accuracy_low/<variant>`, `accuracy_high/<variant>`, `reward/<variant>`,
    `items/<variant>`, and `pass@k/<variant>` for k = 1, 2, 4, ... and the samples. With a mixture these are over all
    its environments, and each has its own as well: `accuracy/<name>`, for further variants `accuracy/<name>/<variant>`.
    `env/<metric>/<variant or name>` are the `metrics` that each environment declares, over greedy episodes that were not lost.
    """
    found = {group.group_id: group for group in groups}
    declared, samples = metrics or {}, run.evaluation.samples
    results: dict[str, Any] = {}
    for variant in run.evaluation.variants:
        of_variant = [task for task in tasks if task.variant == variant and task.view == "true"]
        results |= _summary(variant, of_variant, found, samples, declared.get("", {}))
        for part in run.env.mixture:
            own = [task for task in of_variant if task.env == part.name]
            results |= _summary(label(part.name, variant), own, found, samples, declared.get(part.name, {}))
    return results | _without_sight(tasks, found, run.seed)


def _summary(
    name: str, tasks: Sequence[RolloutTask], found: Mapping[str, FinishedGroup], samples: int, metrics: Metrics
) -> dict[str, Any]:
    greedy = [task for task in tasks if task.temperature == 0]
    answered = [found[task.group_id].trajectories[0] for task in greedy if task.group_id in found]
    right = sum(trajectory.correct for trajectory in answered)
    low, high = wilson_interval(right, len(greedy))
    results: dict[str, Any] = {
        f"accuracy/{name}": right / max(len(greedy), 1),
        f"accuracy_low/{name}": low,
        f"accuracy_high/{name}": high,
        f"reward/{name}": sum(trajectory.reward for trajectory in answered) / max(len(greedy), 1),
        f"turns/{name}": float(np.mean([t.num_turns for t in answered])) if answered else 0.0,
        f"items/{name}": len(greedy),
        **{
            f"{key}/{name}": value
            for key, value in (declared_metrics(metrics, answered) | judge_metrics(answered)).items()
        },
    }
    sampled = [task for task in tasks if task.temperature > 0]
    if sampled:
        counts = [
            sum(one.correct for one in found[task.group_id].trajectories) if task.group_id in found else 0
            for task in sampled
        ]
        for k in sorted({2**power for power in range(samples.bit_length())} | {samples}):
            results[f"pass@{k}/{name}"] = pass_at_k(np.array(counts), samples, k)
    return results


def _without_sight(tasks: Sequence[RolloutTask], found: Mapping[str, FinishedGroup], seed: int) -> dict[str, float]:
    """Accuracy where other images were shown, `sight/accuracy_<view>`, and how much the true ones gain on the same items.

    `sight/accuracy_gap` is that gain over blank images, `sight/accuracy_gap_low` and `_high` its bootstrap interval.
    """

    def right(group_id: str) -> bool:
        return group_id in found and found[group_id].trajectories[0].correct

    results: dict[str, float] = {}
    for view in ("blank", "swapped"):
        viewed = [task for task in tasks if task.view == view]
        if not viewed:
            continue
        seen = np.array([right(task.group_id.removesuffix(f"/{view}")) for task in viewed], dtype=float)
        unseen = np.array([right(task.group_id) for task in viewed], dtype=float)
        results[f"sight/accuracy_{view}"] = float(unseen.mean())
        if view == "blank":
            low, high = bootstrap_interval(seen - unseen, seed)
            results |= {
                "sight/accuracy_gap": float((seen - unseen).mean()),
                "sight/accuracy_gap_low": low,
                "sight/accuracy_gap_high": high,
            }
    return results
