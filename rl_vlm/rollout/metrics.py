"""Metrics of the groups that a learner learns from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from rl_vlm.rollout.judge_metrics import judge_metrics
from rl_vlm.types import Trajectory, TrajectoryGroup


def sampling_metrics(
    groups: Sequence[TrajectoryGroup], version: int, seconds: float, max_turns: int, crosses_versions: bool = False
) -> dict[str, float]:
    """Metrics of the groups that a learner at `version` learns from; `seconds`: how long it waited for them.

    Where turns cross versions the lag bounds the age of a group's newest token, and `rollout/oldest_token` is that of its oldest.
    """
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
    return metrics | part_metrics(trajectories) | metrics_by_env(groups) | judge_metrics(trajectories)


def part_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`reward/part/<name>`: the mean of a part of the reward, before weights, over the episodes that have it."""
    totals = defaultdict(list)
    for trajectory in trajectories:
        sums: defaultdict[str, float] = defaultdict(float)
        for turn in trajectory.turns:
            for name, value in turn.parts:
                sums[name] += value
        for name, value in sums.items():
            totals[name].append(value)
    return {f"reward/part/{name}": float(np.mean(values)) for name, values in totals.items()}


def metrics_by_env(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """Of a mixture: `reward/<name>` and `accuracy/<name>` of each environment that has groups."""
    members: defaultdict[str, list[Trajectory]] = defaultdict(list)
    for group in groups:
        if group.env:
            members[group.env] += group.trajectories
    return {
        **{f"reward/{name}": float(np.mean([one.reward for one in found])) for name, found in members.items()},
        **{f"accuracy/{name}": float(np.mean([one.correct for one in found])) for name, found in members.items()},
    }
