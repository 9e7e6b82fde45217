"""The results of an evaluation from its outcomes: summaries, categories, numbers of the info, and the comparison of two policies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import numpy as np

from rl_vlm.config import RunConfig
from rl_vlm.evaluation.heldout import label, summarize
from rl_vlm.evaluation.outcomes import LOST, Outcome, Side, grouped, outcome
from rl_vlm.rollout.env_metrics import Metrics
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.statistics import bootstrap_interval, mcnemar_p_value, wilson_interval


def summary_of(
    run: RunConfig, tasks: Sequence[RolloutTask], outcomes: Sequence[Outcome], metrics: Mapping[str, Metrics]
) -> dict[str, Any]:
    """`heldout.summarize` of one split, with bootstrap intervals of the rewards: `reward_low/<variant>`, `reward_high/<variant>`."""
    results = summarize(run, tasks, grouped(outcomes, "policy"), metrics)
    paid = {one.id: one.reward for one in outcomes if one.side == "policy"}
    asked: dict[str, list[float]] = {}
    for task in tasks:
        if plain(task):
            for name in {task.variant, label(task.env, task.variant)}:  # of all environments, and of its own
                asked.setdefault(name, []).append(paid.get(task.group_id, 0.0))
    for name, rewards in asked.items():
        low, high = bootstrap_interval(np.array(rewards), run.seed)
        results |= {f"reward_low/{name}": low, f"reward_high/{name}": high}
    return results


def plain(task: RolloutTask | Outcome) -> bool:
    """Whether it belongs to the main figures: greedy and with the true images."""
    greedy = task.kind == "greedy" if isinstance(task, Outcome) else task.temperature == 0
    return greedy and task.view == "true"


def _asked(tasks: Sequence[RolloutTask], outcomes: Sequence[Outcome], side: Side) -> list[Outcome]:
    """The main figures' outcome of each item; one that was lost is wrong and unpaid."""
    found = {one.id: one for one in outcomes if one.side == side and plain(one)}
    lost = {"correct": False, "reward": 0.0, "turns": 0, "tokens": 0, "status": LOST}
    return [found.get(task.group_id) or outcome(task, side, 0, env=task.env, **lost) for task in tasks if plain(task)]


def by_category(
    tasks: Sequence[RolloutTask], outcomes: Sequence[Outcome], key: str
) -> tuple[dict[str, dict[str, Any]], dict[str, int]]:
    """The policy's tables, and how many of its lost items are in none of them.

    Per variant and category: items, accuracy with its Wilson interval, mean reward. The environment names an item's category when it is
    played, so that of a lost one is known where the other policy, a sample or another view has finished it.
    """
    known = {(one.variant, one.index): one.info[key] for one in outcomes if key in one.info}
    members: dict[str, dict[str, list[Outcome]]] = {}
    lost: Counter[str] = Counter()
    for one in _asked(tasks, outcomes, "policy"):
        category = one.info.get(key) if one.status != LOST else known.get((one.variant, one.index))
        if category is not None:
            members.setdefault(one.variant, {}).setdefault(str(category), []).append(one)
        elif one.status == LOST:
            lost[one.variant] += 1
    tables = {
        variant: {name: _row(found) for name, found in sorted(categories.items())}
        for variant, categories in members.items()
    }
    return tables, {variant: count for variant, count in lost.items() if variant in tables}


def _row(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    right = sum(one.correct for one in outcomes)
    low, high = wilson_interval(right, len(outcomes))
    return {
        "items": len(outcomes),
        "accuracy": right / len(outcomes),
        "accuracy_low": low,
        "accuracy_high": high,
        "reward": float(np.mean([one.reward for one in outcomes])),
    }


def info_numbers(outcomes: Sequence[Outcome], key: str) -> dict[str, dict[str, dict[str, float]]]:
    """Per variant and key of the info: how many items have it, and their mean, median (p50) and 90th percentile."""
    columns: dict[str, dict[str, list[float]]] = {}
    for one in outcomes:
        if plain(one):
            for name, value in one.info.items():
                if not isinstance(value, str) and name not in (key, "correct", "index"):
                    columns.setdefault(one.variant, {}).setdefault(name, []).append(float(value))
    return {
        variant: {
            name: {
                "items": len(values),
                "mean": float(np.mean(values)),
                "p50": float(np.percentile(values, 50)),
                "p90": float(np.percentile(values, 90)),
            }
            for name, values in sorted(names.items())
        }
        for variant, names in columns.items()
    }


def compared(tasks: Sequence[RolloutTask], outcomes: Sequence[Outcome], seed: int) -> dict[str, dict[str, Any]]:
    """Per variant: the policy against the other one on the same items; one that a side lost is wrong and unpaid there.

    Differences are the policy's minus the other's, with bootstrap intervals over items; `p_value` is McNemar's, from the items that only one of
    them got right (`only_policy`, `only_against`).
    """
    ours, theirs = (_asked(tasks, outcomes, side) for side in get_args(Side))
    variants: dict[str, tuple[list[Outcome], list[Outcome]]] = {}
    for our, their in zip(ours, theirs, strict=True):
        of_us, of_them = variants.setdefault(our.variant, ([], []))
        of_us.append(our)
        of_them.append(their)
    return {variant: _pairs(*sides, seed) for variant, sides in variants.items()}


def _pairs(ours: Sequence[Outcome], theirs: Sequence[Outcome], seed: int) -> dict[str, Any]:
    right = np.array([[one.correct for one in side] for side in (ours, theirs)], dtype=float)
    paid = np.array([[one.reward for one in side] for side in (ours, theirs)], dtype=float)
    only_policy, only_against = int((right[0] > right[1]).sum()), int((right[0] < right[1]).sum())
    results: dict[str, Any] = {"items": len(ours)}
    for name, answers in (("accuracy", right[0]), ("accuracy_against", right[1])):
        low, high = wilson_interval(int(answers.sum()), len(answers))
        results |= {name: answers.mean(), f"{name}_low": low, f"{name}_high": high}
    for name, (first, second) in (("accuracy", right), ("reward", paid)):
        low, high = bootstrap_interval(first - second, seed)
        results |= {
            f"{name}_difference": (first - second).mean(),
            f"{name}_difference_low": low,
            f"{name}_difference_high": high,
        }
    for name, values in (("reward", paid[0]), ("reward_against", paid[1])):
        low, high = bootstrap_interval(values, seed)
        results |= {name: values.mean(), f"{name}_low": low, f"{name}_high": high}
    return results | {
        "only_policy": only_policy,
        "only_against": only_against,
        "p_value": mcnemar_p_value(only_policy, only_against),
    }
