"""The results of an evaluation from its outcomes: per variant, per category, numbers of the info, and two policies compared.

A lost item counts as wrong and unrewarded everywhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import numpy as np

from rl_vlm.config import PolicyConfig
from rl_vlm.evaluation.outcomes import LOST, Outcome, Side, label, outcome
from rl_vlm.rollout.metrics import Metrics, declared_metrics, judge_metrics
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.statistics import bootstrap_interval, mcnemar_p_value, pass_at_k, wilson_interval

_Samples = Mapping[str, list[Outcome]]  # of one side, by item


def summarize(
    config: PolicyConfig,
    tasks: Sequence[RolloutTask],
    outcomes: Sequence[Outcome],
    metrics: Mapping[str, Metrics] | None = None,
) -> dict[str, Any]:
    """Accuracy with its 95 % interval and mean reward per variant.

    Keys: `accuracy/<variant>`, `accuracy_low/<variant>`, `accuracy_high/<variant>`, `reward/<variant>`, `reward_low/<variant>`,
    `reward_high/<variant>`, `items/<variant>`, and `pass@k/<variant>` for k = 1, 2, 4, ... and the samples. With a mixture these are over
    all its environments, and each has its own as well: `accuracy/<name>`, for further variants `accuracy/<name>/<variant>`.
    `env/<metric>/<variant or name>` are the `metrics` that each environment declares, over greedy episodes that were not lost.
    """
    found: dict[str, list[Outcome]] = {}
    for one in outcomes:
        if one.side == "policy":
            found.setdefault(one.id, []).append(one)
    declared = metrics or {}
    results: dict[str, Any] = {}
    for variant in config.evaluation.variants:
        of_variant = [task for task in tasks if task.variant == variant and task.view == "true"]
        results |= _summary(variant, config, of_variant, found, declared.get("", {}))
        for part in config.env.mixture:
            own = [task for task in of_variant if task.env == part.name]
            results |= _summary(label(part.name, variant), config, own, found, declared.get(part.name, {}))
    return results | _without_sight(tasks, found, config.seed)


def _summary(
    name: str, config: PolicyConfig, tasks: Sequence[RolloutTask], found: _Samples, metrics: Metrics
) -> dict[str, Any]:
    greedy, samples = [task for task in tasks if task.temperature == 0], config.evaluation.samples
    answered = [found[task.group_id][0] for task in greedy if task.group_id in found]
    rewards = [found[task.group_id][0].reward if task.group_id in found else 0.0 for task in greedy]
    results = {
        **_share("accuracy", sum(one.correct for one in answered), len(greedy)),
        **_mean("reward", rewards, config.seed),
        "turns": float(np.mean([one.turns for one in answered])) if answered else 0.0,
        "items": len(greedy),
        **declared_metrics(metrics, answered),
        **judge_metrics(answered),
    }
    sampled = [task for task in tasks if task.temperature > 0]
    if sampled:
        counts = np.array([sum(one.correct for one in found.get(task.group_id, ())) for task in sampled])
        for k in sorted({2**power for power in range(samples.bit_length())} | {samples}):
            results[f"pass@{k}"] = pass_at_k(counts, samples, k)
    return {f"{key}/{name}": value for key, value in results.items()}


def _share(name: str, right: int, items: int) -> dict[str, float]:
    low, high = wilson_interval(right, items)
    return {name: right / max(items, 1), f"{name}_low": low, f"{name}_high": high}


def _mean(name: str, values: Iterable[float], seed: int) -> dict[str, float]:
    numbers = np.array(list(values), dtype=float)
    low, high = bootstrap_interval(numbers, seed)
    return {name: float(numbers.mean()) if len(numbers) else 0.0, f"{name}_low": low, f"{name}_high": high}


def _without_sight(tasks: Sequence[RolloutTask], found: _Samples, seed: int) -> dict[str, float]:
    """Accuracy where other images were shown, `sight/accuracy_<view>`, and how much the true ones gain on the same items.

    `sight/accuracy_gap` is that gain over blank images, `sight/accuracy_gap_low` and `_high` its bootstrap interval.
    """

    def right(names: Iterable[str]) -> np.ndarray:
        return np.array([name in found and found[name][0].correct for name in names], dtype=float)

    results: dict[str, float] = {}
    for view in ("blank", "swapped"):
        names = [task.group_id for task in tasks if task.view == view]
        if not names:
            continue
        unseen = right(names)
        results[f"sight/accuracy_{view}"] = float(unseen.mean())
        if view == "blank":
            seen = right(name.removesuffix(f"/{view}") for name in names)
            results |= _mean("sight/accuracy_gap", seen - unseen, seed)
    return results


def _asked(tasks: Sequence[RolloutTask], outcomes: Sequence[Outcome], side: Side) -> list[Outcome]:
    """The main figures' outcome of each item."""
    found = {one.id: one for one in outcomes if one.side == side and one.is_plain}
    lost = {"correct": False, "reward": 0.0, "turns": 0, "tokens": 0, "status": LOST}
    asked = [found.get(task.group_id) or outcome(task, side, 0, env=task.env, **lost) for task in tasks]
    return [one for one in asked if one.is_plain]


def by_category(
    tasks: Sequence[RolloutTask], outcomes: Sequence[Outcome], key: str
) -> tuple[dict[str, dict[str, Any]], dict[str, int]]:
    """The policy's tables, and how many of its lost items are in none of them.

    Per variant and category: items, accuracy with its Wilson interval, mean reward. The environment names an item's category when it is
    played, so the category of a lost item is known only if the other policy, a sample or another view has finished it.
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
    return {
        "items": len(outcomes),
        **_share("accuracy", sum(one.correct for one in outcomes), len(outcomes)),
        "reward": float(np.mean([one.reward for one in outcomes])),
    }


def info_numbers(outcomes: Sequence[Outcome], key: str) -> dict[str, dict[str, dict[str, float]]]:
    """Per variant and key of the info: how many items have it, and their mean, median (p50) and 90th percentile."""
    columns: dict[str, dict[str, list[float]]] = {}
    for one in outcomes:
        for name, value in one.info.items() if one.is_plain else ():
            if not isinstance(value, str) and name not in (key, "correct", "index"):
                columns.setdefault(one.variant, {}).setdefault(name, []).append(float(value))
    return {
        variant: {
            name: {
                "items": len(values),
                "mean": float(np.mean(values)),
                "p50": float(np.median(values)),
                "p90": float(np.quantile(values, 0.9)),
            }
            for name, values in sorted(names.items())
        }
        for variant, names in columns.items()
    }


def compared(tasks: Sequence[RolloutTask], outcomes: Sequence[Outcome], seed: int) -> dict[str, dict[str, Any]]:
    """Per variant: the policy against the other one on the same items.

    Differences are the policy's minus the other's, with bootstrap intervals over items; `p_value` is McNemar's, from the items that only one of
    them got right (`only_policy`, `only_against`).
    """
    pairs: dict[str, list[tuple[Outcome, Outcome]]] = {}
    for ours, theirs in zip(*(_asked(tasks, outcomes, side) for side in get_args(Side)), strict=True):
        pairs.setdefault(ours.variant, []).append((ours, theirs))
    return {variant: _comparison(of_variant, seed) for variant, of_variant in pairs.items()}


def _comparison(pairs: Sequence[tuple[Outcome, Outcome]], seed: int) -> dict[str, Any]:
    right = np.array([[one.correct for one in pair] for pair in pairs], dtype=float).T
    rewards = np.array([[one.reward for one in pair] for pair in pairs], dtype=float).T
    only_policy, only_against = int((right[0] > right[1]).sum()), int((right[0] < right[1]).sum())
    return {
        "items": len(pairs),
        **_share("accuracy", int(right[0].sum()), len(pairs)),
        **_share("accuracy_against", int(right[1].sum()), len(pairs)),
        **_mean("reward", rewards[0], seed),
        **_mean("reward_against", rewards[1], seed),
        **_mean("accuracy_difference", right[0] - right[1], seed),
        **_mean("reward_difference", rewards[0] - rewards[1], seed),
        "only_policy": only_policy,
        "only_against": only_against,
        "p_value": mcnemar_p_value(only_policy, only_against),
    }
