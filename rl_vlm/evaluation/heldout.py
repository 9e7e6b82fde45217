"""The tasks of a held-out evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rl_vlm.config import PolicyConfig
from rl_vlm.evaluation.outcomes import label
from rl_vlm.rollout.tasks import RolloutTask, View
from rl_vlm.seeding import derive_seed


def evaluation_tasks(config: PolicyConfig, sizes: Mapping[str, int | None], min_version: int) -> list[RolloutTask]:
    """One greedy episode per environment, item and variant; with `evaluation.samples` above 1 also a group of sampled ones.

    `sizes` of the split by name of the environment; None for items without end.
    """
    evaluation = config.evaluation
    kinds = [("greedy", 1, 0.0)]
    if evaluation.samples > 1:
        kinds.append(("sampled", evaluation.samples, config.rollout.temperature))
    return [
        RolloutTask(
            group_id=f"{label(env, variant)}/{kind}/{index:06d}",
            index=index,
            split=evaluation.split,
            seed=derive_seed(config.seed, 4, index),
            sampling_seed=derive_seed(config.seed, 5, index),
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
