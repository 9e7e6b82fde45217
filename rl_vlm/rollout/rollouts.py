"""Complete groups on their way to the learner, in rounds or continuously, and counts of what was dropped and lost."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from rl_vlm.config import PolicyConfig
from rl_vlm.rollout.actors import ActorPool
from rl_vlm.rollout.sampler import RESTART_GRACE_S, STOP_CHECK_S, RoundAbandonedError, Sampler, SamplingError
from rl_vlm.rollout.task_stream import TaskStream
from rl_vlm.rollout.tasks import RolloutResult, RolloutTask, merged
from rl_vlm.statistics import are_equal
from rl_vlm.tracing import Span, traceparent
from rl_vlm.types import RLVLMError, TrajectoryGroup

_MOST_LOST = 64  # lost groups from which on a run ends if they are more than the complete ones


class TooManyFailuresError(RLVLMError):
    """Too many groups in a row were lost, or most of all, or every group of a run.

    Do: repair the environment or the server that the message names, then `--resume`.
    """


class GroupBuffer:
    """Holds groups and never gives one that is too old.

    A group's age is the learner's version minus the oldest version that sampled a token of it; where turns cross
    versions (`partial`), minus the newest: when episodes began does not count.
    """

    def __init__(self, max_lag: int, partial: bool = False) -> None:
        self._max_lag, self._partial = max_lag, partial
        self._groups: list[TrajectoryGroup] = []

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, groups: Iterable[TrajectoryGroup]) -> None:
        """Add complete groups, in any order."""
        self._groups.extend(groups)
        # The oldest first. Ids sort in the order in which tasks were made, so the order of arrival does not matter.
        self._groups.sort(key=lambda group: (self._version(group), group.group_id))

    def take(self, count: int, version: int) -> tuple[list[TrajectoryGroup], list[TrajectoryGroup]]:
        """Up to `count` groups for a learner at `version`, and all that are too old for it; neither stays here."""
        fresh = [group for group in self._groups if version - self._version(group) <= self._max_lag]
        stale = [group for group in self._groups if version - self._version(group) > self._max_lag]
        self._groups = fresh[count:]
        return fresh[:count], stale

    def batch_leaves_time(self, count: int, version: int, running: Sequence[int]) -> bool:
        """Whether all others can still be learned from in time after the learner has taken the `count` oldest groups.

        `running` holds the version of each group that is not complete. A group of version w is due when the learner is
        at w + max_lag at the latest, and every step takes `count`: so of what remains, at most k × `count` groups may
        be due at `version` + k (earliest deadline first; none for k = 0). Otherwise the learner has to wait for the
        oldest.
        """
        rest = [self._version(group) for group in self._groups[count:]] + list(running)
        return all(
            sum(oldest + self._max_lag <= version + k for oldest in rest) <= k * count for k in range(self._max_lag)
        )

    def _version(self, group: TrajectoryGroup) -> int:
        return group.newest_version if self._partial else group.oldest_version

    def clear(self) -> None:
        self._groups = []


class Rollouts:
    """Gives groups to the learner and counts what was learned from, dropped and lost.

    At lag 0 a round is sampled, then learned from; a deterministic run is lock-step, refilled groups included. With lag
    L and B groups per step, groups are handed out one by one and used when they are complete, so that env runners never
    wait for the slowest of a round: at most (L + 1) × B are under way or wait while the learner waits, and L × B while
    it works. So every group can be learned from before it is too old. `rollout.late_groups` says whether the learner
    waits for one that is late, or steps with the first B and drops late ones.

    Args:
        sampler: samples whole rounds: evaluations, and training at lag 0.
        continuous: samples groups one by one, with a lag.
    """

    def __init__(
        self, sampler: Sampler, stream: TaskStream, run: PolicyConfig, continuous: Sampler | None = None
    ) -> None:
        self._sampler, self._continuous, self._stream, self._run = sampler, continuous, stream, run
        self._batch = run.rollout.prompts_per_iteration
        self.crosses_versions = run.rollout.crosses_versions
        self._buffer = GroupBuffer(run.rollout.max_policy_lag, partial=self.crosses_versions)
        share = run.algorithm.max_refill
        # Groups without a gradient that may be replaced in an iteration (dynamic sampling, DAPO, arXiv 2503.14476,
        # section 3.2). A small share of few groups is one at least.
        self._most_refills = max(round(share * self._batch), int(share > 0))
        self._refills_left = self._most_refills
        self._opened: list[RolloutTask] = []  # of the next round, whose episodes are being opened
        self._lost_in_a_row = self._lost = self._complete = 0
        self._failures: dict[str, str] = {}  # why groups were lost, by their ids
        self.stop_requested: Callable[[], bool] = lambda: False
        self.trajectories = 0  # given to the learner
        self.dropped: Counter[str] = Counter()
        self.requests_by_replica: Counter[str] = Counter()
        self._spans: list[Span] = []
        self._iteration = 0
        self._measured: dict[str, float] = {}  # of the last iteration
        self._looked = time.monotonic()

    def next_groups(self, version: int, iterations_left: int) -> list[TrajectoryGroup]:
        """Complete groups for a learner at `version`, none older than `max_policy_lag`. Raises SamplingError,
        TooManyFailuresError, and RoundAbandonedError once `stop_requested()` is true."""
        self._iteration = self._run.algorithm.iterations - iterations_left - 1
        self._stream.begin(self._iteration)
        self._refills_left = self._most_refills
        if self._continuous is not None:
            return self._sample_ahead(self._continuous, version, iterations_left)
        groups = self._sample_round(version)
        if self._lost and not (self._complete or iterations_left):  # a run shorter than the limit of failures in a row
            raise self._too_many("All groups of this run")
        return groups

    def _sample_round(self, version: int) -> list[TrajectoryGroup]:
        """Lost groups are missing from the batch; those without a gradient are replaced in further rounds."""
        runner_s = 0.0
        tasks, self._opened = self._opened or self._stream.take(self._batch), []
        while tasks:
            self._give(self._sampler, tasks, version)
            result = self._sampler.finish(self.stop_requested)
            runner_s += result.seconds
            tasks = self._stream.take(len(self._add(result)))
        self._measured = {"time/runner": runner_s}
        return self._take(self._batch, version)

    def _sample_ahead(self, sampler: Sampler, version: int, iterations_left: int) -> list[TrajectoryGroup]:
        """Exactly `prompts_per_iteration` groups: lost and dropped ones are replaced."""
        rollout, batch = self._run.rollout, self._batch
        ahead = min(rollout.max_policy_lag, iterations_left)
        self._take(0, version)  # drops what the newest step has made too old
        self._fill(sampler, batch * (ahead + 1), version)
        progress, sampled, runner_s = time.monotonic(), 0, 0.0
        while not self._is_ready(sampler, version):
            if self.stop_requested():
                raise RoundAbandonedError("Sampling was stopped.")
            result = sampler.collect(version, STOP_CHECK_S)
            self._add(result)
            self._take(0, version)
            if result.groups or result.lost:
                progress, sampled = time.monotonic(), sampled + len(result.groups)
                runner_s += result.seconds
                self._fill(sampler, batch * (ahead + 1), version)
            elif time.monotonic() - progress > 2 * rollout.timeout_s:
                raise SamplingError(
                    f"No group was completed within {2 * rollout.timeout_s:g} s: see the logs of the env runners, "
                    "or raise rollout.timeout_s."
                )
        taken = self._take(batch, version)
        # The next groups are sampled with the current weights while the learner works.
        self._fill(sampler, batch * ahead, version)
        now = time.monotonic()
        available_s = (now - self._looked) * rollout.num_env_runners * rollout.groups_at_once
        self._looked = now
        self._measured = {
            "time/runner": runner_s / max(sampled, 1),
            "rollout/utilisation": min(runner_s / max(available_s, 1e-9), 1.0),
            "rollout/under_way": float(len(sampler)),
            "rollout/waiting": float(len(self._buffer)),
        }
        return taken

    def _is_ready(self, sampler: Sampler, version: int) -> bool:
        """Whether the learner may take a batch; groups that are too old have been dropped."""
        running = sampler.versions()
        if len(self._buffer) < self._batch:
            return False
        if not running or self._run.rollout.late_groups == "drop":
            return True
        if self.crosses_versions:
            running = []  # these go on with newer weights, so none becomes too old
        return self._buffer.batch_leaves_time(self._batch, version, running)

    def _fill(self, sampler: Sampler, limit: int, version: int) -> None:
        missing = limit - len(self._buffer) - len(sampler)
        if missing > 0:
            self._give(sampler, self._stream.take(missing), version)

    def _give(self, sampler: Sampler, tasks: Sequence[RolloutTask], version: int) -> None:
        trace = traceparent()
        sampler.give([replace(task, trace=trace) for task in tasks], self._run.rollout.timeout_s, version)

    def open_next(self) -> None:
        """At lag 0, before the learner works: open the next round's episodes and encode their images, which needs no
        newer weights. Not in a deterministic run, which is lock-step."""
        if self._continuous is None and self._run.rollout.open_ahead and not self._run.deterministic:
            self._stream.begin(self._iteration + 1)
            self._opened = self._stream.take(self._batch)
            self._sampler.open_ahead(self._opened)

    def evaluate(self, tasks: Sequence[RolloutTask], timeout_s: float) -> tuple[list[TrajectoryGroup], RolloutResult]:
        """Run held-out tasks, which are not learned from; lost ones end no run. Groups under way go on beside them."""
        # Not all items at once where each of them takes a process.
        bounded = self._run.env.isolation == "process"
        at_once = self._run.evaluation.at_once if bounded else max(len(tasks), 1)
        parts: list[RolloutResult] = []
        for start in range(0, len(tasks), at_once):
            self._sampler.give(tasks[start : start + at_once], timeout_s)
            parts.append(self._sampler.finish(self.stop_requested))
        result = merged(parts)
        self._failures |= result.lost
        self.dropped += Counter(runner_died=result.dropped.get("runner_died", 0), test_items=len(result.lost))
        return result.groups, result

    def _add(self, result: RolloutResult) -> list[TrajectoryGroup]:
        """Count what was sampled and put it into the buffer; returns the groups that must be replaced."""
        self._spans += result.spans
        # Equal rewards have no gradient under estimators that compare them; with others there is no refill.
        replaced = [group for group in result.groups if are_equal(group.rewards)][: self._refills_left]
        counts = {"request_retries": result.retries, "group_lost": len(result.lost), "no_gradient": len(replaced)}
        self.dropped.update(result.dropped)
        self.dropped.update({reason: count for reason, count in counts.items() if count})
        self._count_failures(result)
        self._stream.lose(result.lost)
        self._refills_left -= len(replaced)
        self._stream.done_with(replaced)
        names = {group.group_id for group in replaced}
        self._buffer.add(group for group in result.groups if group.group_id not in names)
        return replaced

    def _count_failures(self, result: RolloutResult) -> None:
        """Raises TooManyFailuresError, which names the last reason."""
        self._failures |= result.lost
        self._lost, self._complete = self._lost + len(result.lost), self._complete + len(result.groups)
        self._lost_in_a_row = 0 if result.groups else self._lost_in_a_row + len(result.lost)
        if self._lost >= _MOST_LOST and self._lost > self._complete:
            raise self._too_many(f"{self._lost} of {self._lost + self._complete} groups")
        if self._lost_in_a_row >= self._run.rollout.max_consecutive_failures:
            advice = ", or raise rollout.max_consecutive_failures"
            raise self._too_many(f"{self._lost_in_a_row} groups in a row", advice)

    def _too_many(self, which: str, advice: str = "") -> TooManyFailuresError:
        last = list(self._failures.values())[-1].rstrip(".")
        return TooManyFailuresError(
            f"{which} were lost, the last because of: {last}. Repair the environment, the reward or the server{advice}."
        )

    def _take(self, count: int, version: int) -> list[TrajectoryGroup]:
        """Groups for the learner, from the buffer; groups that are too old are dropped."""
        taken, stale = self._buffer.take(count, version)
        if stale:
            self.dropped["too_old"] += len(stale)
        self._stream.done_with([*taken, *stale])
        self.trajectories += sum(len(group) for group in taken)
        self.requests_by_replica.update(
            replica for group in taken for trajectory in group.trajectories for replica in trajectory.replica_ids
        )
        return taken

    def take_spans(self) -> list[Span]:
        """The spans of traced groups that have come since the last call: with a lag, those of an earlier iteration."""
        taken, self._spans = self._spans, []
        return taken

    def take_failures(self) -> dict[str, str]:
        """Why groups were lost since the last call, by their ids."""
        taken, self._failures = self._failures, {}
        return taken

    def metrics(self) -> dict[str, float]:
        """Of the last iteration, of the tasks, and what was dropped since the run began."""
        dropped = {f"dropped/{reason}": float(count) for reason, count in self.dropped.items()}
        return self._measured | self._stream.metrics() | dropped

    def state(self) -> dict[str, Any]:
        """What `restore` needs. Tasks that are under way are sampled anew after a resume: none is lost."""
        return {
            "tasks": self._stream.state(),
            "trajectories": self.trajectories,
            "dropped": dict(self.dropped),
            "requests_by_replica": dict(self.requests_by_replica),
        }

    def restore(self, state: dict[str, Any], counts: bool) -> None:
        """Go back to a saved place in the data, and with `counts` to the saved counts as well."""
        self._stream.restore(state["tasks"])
        self._buffer.clear()
        self._opened = []
        if self._continuous is not None:
            self._continuous.clear()
        if counts:
            self.trajectories = int(state["trajectories"])
            self.dropped = Counter(state["dropped"])
            self.requests_by_replica = Counter(state["requests_by_replica"])


def make_rollouts(runners: ActorPool, stream: TaskStream, run: PolicyConfig) -> Rollouts:
    # All may have been on one preemptible node: the autoscaler starts another machine.
    grace_s = max(RESTART_GRACE_S, run.serving.startup_timeout_s if os.environ.get("RL_VLM_AUTOSCALING") else 0.0)
    places = run.rollout.groups_at_once + 1  # see VLMEnvRunner.concurrent_calls
    ahead = Sampler(runners, sharded=False, places=places, grace_s=grace_s) if run.rollout.max_policy_lag else None
    return Rollouts(Sampler(runners, sharded=True, grace_s=grace_s), stream, run, ahead)
