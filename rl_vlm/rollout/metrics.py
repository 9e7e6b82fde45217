"""Metrics of sampled groups: numbers that environments declare, the replies of a judge, and the sampling itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from rl_vlm.types import TrajectoryGroup

Metrics = Mapping[str, tuple[float, ...]]  # VisionEnv.metrics: name of an info key -> its quantiles


def group_metrics(declared: Mapping[str, Metrics], groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """`declared_metrics` of each environment by name; those of a mixture end in `/<name>`."""
    metrics: dict[str, float] = {}
    for env, own in declared.items():
        values = declared_metrics(own, [one.info for group in groups if group.env == env for one in group.trajectories])
        metrics |= {f"{key}/{env}": value for key, value in values.items()} if env else values
    return metrics


def declared_metrics(declared: Metrics, infos: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """`env/<name>`: the mean over the episodes that have it; `env/<name>_p50` and so on for its quantiles."""
    metrics: dict[str, float] = {}
    for name, quantiles in declared.items():
        values = [float(info[name]) for info in infos if isinstance(info.get(name), (bool, int, float))]
        if not values:
            continue
        metrics[f"env/{name}"] = float(np.mean(values))
        for quantile in quantiles:
            metrics[f"env/{name}_p{round(100 * quantile)}"] = float(np.quantile(values, quantile))
    return metrics


def judge_metrics(infos: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Empty without a judge.

    `judge/win_rate`: the mean of 1, 0.5 and 0 for answers that won, contradicted the judge's orders or lost.

    `judge/order_bias`: share of the answers asked about whose orders contradict each other; `judge/first_rate`: share
    of replies for the text that was shown first, 0.5 without a bias; `judge/unclear`: share of replies that chose
    neither; `judge/refused`: share of answers that lost without a question; `judge/requests` and `judge/tokens` in all;
    `judge/seconds`: how long a group waited, the mean.
    """
    judged = [info for info in infos if "judge_win" in info]
    if not judged:
        return {}
    notes = {key: np.array([float(info[key]) for info in judged]) for key in judged[0] if key.startswith("judge_")}
    asked = notes["judge_first"] >= 0
    return {
        "judge/win_rate": float(notes["judge_win"].mean()),
        "judge/order_bias": float(notes["judge_contradicts"][asked].sum() / max(asked.sum(), 1)),
        "judge/first_rate": float(notes["judge_first"][asked].sum() / max(asked.sum(), 1)),
        "judge/unclear": float(notes["judge_unclear"][asked].sum() / max(asked.sum(), 1) / 2),
        "judge/refused": float(notes["judge_refused"].mean()),
        "judge/requests": float(notes["judge_requests"].sum()),
        "judge/tokens": float(notes["judge_tokens"].sum()),
        "judge/seconds": float(notes["judge_seconds"].mean()),
    }


def sampling_metrics(
    groups: Sequence[TrajectoryGroup], version: int, seconds: float, max_turns: int, crosses_versions: bool = False
) -> dict[str, float]:
    """Metrics of the groups that a learner at `version` learns from, for which it waited `seconds`. Where turns cross
    versions the lag bounds the age of a group's newest token; `rollout/oldest_token` is that of its oldest."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if not trajectories:
        return {}
    rewards = np.array([trajectory.reward for trajectory in trajectories])
    tokens = sum(trajectory.num_sampled for trajectory in trajectories)
    metrics = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "rollout/turns": float(np.mean([len(trajectory.turns) for trajectory in trajectories])),
        "rollout/tokens": float(tokens),
        "rollout/tokens_per_s": tokens / max(seconds, 1e-9),
        "rollout/truncated": float(np.mean([t.status == "truncated" for t in trajectories])),
        "rollout/groups": float(len(groups)),
    }
    oldest = float(max(version - group.oldest_version for group in groups))
    metrics["rollout/lag_max"] = oldest
    if crosses_versions:
        metrics["rollout/lag_max"] = float(max(version - group.newest_version for group in groups))
        metrics["rollout/oldest_token"] = oldest
    for turn in range(2, max_turns + 1):
        share = float(np.mean([len(trajectory.turns) >= turn for trajectory in trajectories]))
        if share or turn == 2:
            metrics[f"rollout/reached_turn_{turn}"] = share
    for key in ("correct", "tool_calls", "tool_errors"):
        values = [t.info[key] for t in trajectories if isinstance(t.info.get(key), (bool, int, float))]
        if values:
            metrics[f"rollout/{key}"] = float(np.mean(values))
    # The mean of each part of the reward, before weights, over the episodes that have it.
    totals = defaultdict(list)
    for trajectory in trajectories:
        sums: defaultdict[str, float] = defaultdict(float)
        for name, value in (part for turn in trajectory.turns for part in turn.parts):
            sums[name] += value
        for name, value in sums.items():
            totals[name].append(value)
    metrics |= {f"reward/part/{name}": float(np.mean(values)) for name, values in totals.items()}
    for name in sorted({group.env for group in groups if group.env}):  # of a mixture
        members = [one for group in groups if group.env == name for one in group.trajectories]
        metrics[f"reward/{name}"] = float(np.mean([one.reward for one in members]))
        metrics[f"accuracy/{name}"] = float(np.mean([one.correct for one in members]))
    return metrics | judge_metrics(one.info for one in trajectories)
