"""Rollouts: rounds of sampling for a learner, ahead of it where the lag allows, and the groups that it may learn from."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rl_vlm.config import RunConfig
from rl_vlm.rollout.group_buffer import GroupBuffer
from rl_vlm.rollout.retry import FailureBudget
from rl_vlm.rollout.sampler import RolloutSampler, Round
from rl_vlm.rollout.task_stream import TaskStream
from rl_vlm.rollout.tasks import RolloutResult, RolloutTask
from rl_vlm.types import TrajectoryGroup


class Rollouts:
    """Samples rounds for the learner and counts what was learned from, dropped and lost.

    Args:
        sampler: runs rounds on the env runners.
        stream: the tasks.
        run: lag, budgets and iterations.
    """

    def __init__(self, sampler: RolloutSampler, stream: TaskStream, run: RunConfig) -> None:
        self._sampler, self._stream, self._run = sampler, stream, run
        self._buffer = GroupBuffer(run.rollout.max_policy_lag)
        self._failures = FailureBudget(run.rollout.max_consecutive_failures)
        self._rounds: deque[Round] = deque()
        self._prepared: list[RolloutTask] | None = None  # tasks whose episodes are being opened
        self.stop_requested: Callable[[], bool] = lambda: False
        self.trajectories = 0  # given to the learner
        self.dropped: Counter[str] = Counter()
        self.requests_by_replica: Counter[str] = Counter()
        self.timings: dict[str, float] = {}  # seconds of the last round: env, runner

    @property
    def restarts(self) -> int:
        """How often an env runner died or was restarted."""
        return self._sampler.restarts

    def next_groups(self, version: int, iterations_left: int) -> list[TrajectoryGroup]:
        """Complete groups for a learner at `version`, none older than `max_policy_lag`; starts the rounds that the lag allows.

        `iterations_left` counts the iterations after this one.
        """
        rollout = self._run.rollout
        if not self._rounds:
            self._start_round(version)
        groups, result = self._sampler.collect(self._rounds[0], self.stop_requested)
        self._rounds.popleft()
        self._count(result)
        self._failures.record(len(groups), result.lost)
        self._stream.sampled(groups)
        self._stream.finish(result.lost)
        self._buffer.add(groups)
        taken, stale = self._buffer.take(rollout.prompts_per_iteration, version)
        if stale:
            self.dropped["too_old"] += len(stale)
        self._stream.finish(group.group_id for group in [*taken, *stale])
        # The next rounds are sampled with the current weights while the learner works.
        while len(self._rounds) < min(rollout.max_policy_lag, iterations_left):
            self._start_round(version)
        self.trajectories += sum(len(group) for group in taken)
        for group in taken:
            for trajectory in group.trajectories:
                self.requests_by_replica.update(trajectory.replica_ids)
        return taken

    def _start_round(self, version: int) -> None:
        tasks, self._prepared = self._prepared or self._stream.round(), None
        self._rounds.append(self._sampler.start([replace(task, min_version=version) for task in tasks]))

    def open_next(self) -> None:
        """Open the next round's episodes and encode their images: neither needs the weights that are learned meanwhile."""
        rollout = self._run.rollout
        # Not in a deterministic run: features of images that are encoded in another batch differ in their last bits.
        if rollout.open_ahead and not rollout.max_policy_lag and not self._run.deterministic:
            self._prepared = self._stream.round()
            self._sampler.prepare(self._prepared)

    def evaluate(self, tasks: Sequence[RolloutTask], timeout_s: float) -> tuple[list[TrajectoryGroup], RolloutResult]:
        """Run held-out tasks, which are not learned from."""
        work = self._sampler.start(tasks, timeout_s)
        groups, result = self._sampler.collect(work, self.stop_requested)
        self._failures.record(len(groups), result.lost)
        if died := result.dropped.get("runner_died"):
            self.dropped["runner_died"] += died
        return groups, result

    def _count(self, result: RolloutResult) -> None:
        self.timings = {"env": result.timings.get("env", 0.0), "runner": result.timings.get("sample", 0.0)}
        self.dropped.update(result.dropped)
        if result.retries:
            self.dropped["request_retries"] += result.retries
        if result.lost:
            self.dropped["group_lost"] += len(result.lost)

    def state(self) -> dict[str, Any]:
        """What `restore` needs. Rounds that are being sampled are sampled anew after a resume: none of their items is lost."""
        return {
            "tasks": self._stream.state(),
            "trajectories": self.trajectories,
            "dropped": dict(self.dropped),
            "requests_by_replica": dict(self.requests_by_replica),
        }

    def restore(self, state: dict[str, Any], counts: bool) -> None:
        """Go back to a saved place in the data, and with `counts` to the saved figures as well."""
        self._stream.restore(state["tasks"])
        self._rounds.clear()
        self._buffer.clear()
        self._prepared = None
        if counts:
            self.trajectories = int(state["trajectories"])
            self.dropped = Counter(state["dropped"])
            self.requests_by_replica = Counter(state["requests_by_replica"])


def sampling_figures(
    groups: Sequence[TrajectoryGroup], version: int, seconds: float, max_turns: int
) -> dict[str, float]:
    """Figures of the groups that a learner at `version` learns from; `seconds`: how long it waited for them."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if not trajectories:
        return {}
    rewards = np.array([trajectory.reward for trajectory in trajectories])
    tokens = sum(trajectory.num_sampled for trajectory in trajectories)
    figures = {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "rollout/turns": float(np.mean([len(trajectory.turns) for trajectory in trajectories])),
        "rollout/tokens": float(tokens),
        "rollout/tokens_per_s": tokens / max(seconds, 1e-9),
        "rollout/truncated": float(np.mean([t.status == "truncated" for t in trajectories])),
        "rollout/groups": float(len(groups)),
        "rollout/lag_max": float(max(version - group.oldest_version for group in groups)),
    }
    for turn in range(2, max_turns + 1):
        share = float(np.mean([len(trajectory.turns) >= turn for trajectory in trajectories]))
        if share or turn == 2:
            figures[f"rollout/reached_turn_{turn}"] = share
    for key in ("correct", "tool_calls", "tool_errors"):
        values = [t.info[key] for t in trajectories if isinstance(t.info.get(key), (bool, int, float))]
        if values:
            figures[f"rollout/{key}"] = float(np.mean(values))
    return figures
