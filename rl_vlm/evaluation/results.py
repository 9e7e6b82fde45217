"""The results of an evaluation, computed from its outcomes: accuracy, rewards, categories, comparisons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import numpy as np

from rl_vlm.config import PolicyConfig
from rl_vlm.evaluation.outcomes import LOST, Outcome, Side, label, new_outcome
from rl_vlm.rollout.metrics import Metrics, declared_metrics, judge_metrics
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.statistics import bootstrap_interval, mcnemar_p_value, pass_at_k, wilson_interval

_Items = Mapping[str, list[Outcome]]  # of one side, by id


def losses(lost: Mapping[str, str]) -> dict[str, Any]:
    """What results say of lost tasks: how many and, where there are any, the commonest reasons with their counts."""
    if not lost:
        return {"lost": 0}
    return {"lost": len(lost), "lost_because": dict(Counter(lost.values()).most_common(5))}


def _by_item(tasks: Sequence[RolloutTask], outcomes: Iterable[Outcome], side: Side) -> dict[str, list[Outcome]]:
    """The outcomes of each task; one that is lost has a single outcome, which is wrong and unrewarded."""
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.side == side:
            found.setdefault(outcome.id, []).append(outcome)
    lost = {"correct": False, "reward": 0.0, "turns": 0, "tokens": 0, "status": LOST}
    return {
        task.group_id: found.get(task.group_id) or [new_outcome(task, side, 0, env=task.env, **lost)] for task in tasks
    }


def summarize(
    config: PolicyConfig,
    tasks: Sequence[RolloutTask],
    outcomes: Sequence[Outcome],
    metrics: Mapping[str, Metrics] | None = None,
) -> dict[str, Any]:
    """Accuracy and mean reward per variant, with 95 % intervals.

    Keys: `accuracy/<variant>`, `accuracy_low/<variant>`, `accuracy_high/<variant>`, the same of `reward`,
    `items/<variant>`, and `pass@k/<variant>` for k = 1, 2, 4, ... and the samples. With a mixture these are over all
    its environments, and each has its own as well: `accuracy/<name>`, for further variants `accuracy/<name>/<variant>`.
    `env/<metric>/<variant or name>` are the `metrics` that each environment declares, over greedy episodes that were
    not lost.
    """
    items, results = _by_item(tasks, outcomes, "policy"), dict[str, Any]()
    for variant in config.evaluation.variants:
        for env in ("", *(part.name for part in config.env.mixture)):
            own = [t for t in tasks if t.variant == variant and t.view == "true" and env in ("", t.env)]
            results |= _summary(label(env, variant), config, own, items, (metrics or {}).get(env, {}))
    return results | _without_sight(tasks, items, config.seed)


def _summary(
    name: str, config: PolicyConfig, tasks: Sequence[RolloutTask], items: _Items, metrics: Metrics
) -> dict[str, Any]:
    greedy = [items[task.group_id][0] for task in tasks if task.temperature == 0]
    answered, samples = [outcome for outcome in greedy if outcome.status != LOST], config.evaluation.samples
    results = {
        **_share("accuracy", sum(outcome.correct for outcome in greedy), len(greedy)),
        **_mean("reward", (outcome.reward for outcome in greedy), config.seed),
        "turns": float(np.mean([outcome.turns for outcome in answered])) if answered else 0.0,
        "items": len(greedy),
        **declared_metrics(metrics, [one.info for one in answered]),
        **judge_metrics(one.info for one in answered),
    }
    counts = [sum(one.correct for one in items[task.group_id]) for task in tasks if task.temperature > 0]
    if counts:
        for k in sorted({2**power for power in range(samples.bit_length())} | {samples}):
            results[f"pass@{k}"] = pass_at_k(np.array(counts), samples, k)
    return {f"{key}/{name}": value for key, value in results.items()}


def _share(name: str, right: int, items: int) -> dict[str, float]:
    low, high = wilson_interval(right, items)
    return {name: right / max(items, 1), f"{name}_low": low, f"{name}_high": high}


def _mean(name: str, values: Iterable[float], seed: int) -> dict[str, float]:
    numbers = np.array(list(values), dtype=float)
    low, high = bootstrap_interval(numbers, seed)
    return {name: float(numbers.mean()) if len(numbers) else 0.0, f"{name}_low": low, f"{name}_high": high}


def _without_sight(tasks: Sequence[RolloutTask], items: _Items, seed: int) -> dict[str, float]:
    """Accuracy with other images, `sight/accuracy_<view>`, and what the true ones gain over blank ones on the same
    items, `sight/accuracy_gap`, with its bootstrap interval."""
    results: dict[str, float] = {}
    for view in ("blank", "swapped"):
        names = [task.group_id for task in tasks if task.view == view]
        if names:
            unseen = np.array([items[name][0].correct for name in names], dtype=float)
            results[f"sight/accuracy_{view}"] = float(unseen.mean())
        if names and view == "blank":
            seen = [items[name.removesuffix(f"/{view}")][0].correct for name in names]
            results |= _mean("sight/accuracy_gap", np.array(seen, dtype=float) - unseen, seed)
    return results


def _asked(tasks: Sequence[RolloutTask], outcomes: Sequence[Outcome], side: Side) -> list[Outcome]:
    """Each item's outcome in the main results."""
    return [items[0] for items in _by_item(tasks, outcomes, side).values() if items[0].is_plain]


def by_category(
    tasks: Sequence[RolloutTask], outcomes: Sequence[Outcome], key: str
) -> dict[str, dict[str, dict[str, Any]]]:
    """Per variant and category of the policy: items, accuracy with its Wilson interval, and mean reward. An environment
    names an item's category when it is played, so lost items are a category of their own."""
    members: dict[str, dict[str, list[Outcome]]] = {}
    for outcome in _asked(tasks, outcomes, "policy"):
        category = str(outcome.info.get(key, outcome.status))
        if key in outcome.info or outcome.status == LOST:
            members.setdefault(outcome.variant, {}).setdefault(category, []).append(outcome)
    return {
        variant: {
            name: {
                "items": len(found),
                **_share("accuracy", sum(outcome.correct for outcome in found), len(found)),
                "reward": float(np.mean([outcome.reward for outcome in found])),
            }
            for name, found in sorted(categories.items())
        }
        for variant, categories in members.items()
        if set(categories) != {LOST}
    }


def info_numbers(outcomes: Sequence[Outcome], key: str) -> dict[str, dict[str, dict[str, float]]]:
    """Per variant and key of the info: how many items have it, and their mean, median (p50) and 90th percentile."""
    columns: dict[str, dict[str, list[float]]] = {}
    for outcome in outcomes:
        for name, value in outcome.info.items() if outcome.is_plain else ():
            if not isinstance(value, str) and name not in (key, "correct", "index"):
                columns.setdefault(outcome.variant, {}).setdefault(name, []).append(float(value))
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
    """Per variant: the policy against the other one on the same items, and the policy's minus the other's, with
    bootstrap intervals over items; `p_value` is McNemar's, from the items that only one of them got right."""
    pairs: dict[str, list[tuple[Outcome, Outcome]]] = {}
    for ours, theirs in zip(*(_asked(tasks, outcomes, side) for side in get_args(Side)), strict=True):
        pairs.setdefault(ours.variant, []).append((ours, theirs))
    return {variant: _comparison(of_variant, seed) for variant, of_variant in pairs.items()}


def _comparison(pairs: Sequence[tuple[Outcome, Outcome]], seed: int) -> dict[str, Any]:
    right = np.array([[outcome.correct for outcome in pair] for pair in pairs], dtype=float).T
    rewards = np.array([[outcome.reward for outcome in pair] for pair in pairs], dtype=float).T
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
