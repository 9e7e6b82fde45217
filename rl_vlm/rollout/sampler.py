"""The driver's side of sampling: distributes tasks to env runners, collects groups, and replaces runners that die or hang."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from rl_vlm.rollout.runners import EnvRunners
from rl_vlm.rollout.tasks import RolloutResult, RolloutTask
from rl_vlm.types import RLVLMError, TrajectoryGroup

logger = logging.getLogger(__name__)

# How often a wait checks whether the user wants to stop.
_STOP_CHECK_S = 0.5
RESTART_GRACE_S = 120.0  # how long a process takes to come back at most, on a machine that is there


class SamplingError(RLVLMError):
    """No env runner is left, or a round of sampling ran into its deadline."""


class RoundAbandonedError(RLVLMError):
    """The user asked to stop while a round was being sampled."""


def wait_for_some(calls: list[ray.ObjectRef], timeout_s: float) -> list[ray.ObjectRef]:
    """The calls that are complete, once one is; none when none is within `timeout_s`.

    `ray.wait` looks at all calls and returns no more than it was asked for: one by one, N calls would cost N² looks.
    """
    ready, others = ray.wait(calls, num_returns=1, timeout=timeout_s)
    if ready and others:
        ready += ray.wait(others, num_returns=len(others), timeout=0)[0]
    return ready


@dataclass(slots=True)
class Round:
    """Tasks that are being sampled, `at_once` at a time by each runner. `open` maps a running call to (runner id, its tasks)."""

    timeout_s: float
    at_once: int | None = None
    open: dict[ray.ObjectRef, tuple[int, list[RolloutTask]]] = field(default_factory=dict)
    waiting: list[list[RolloutTask]] = field(default_factory=list)  # shards without a runner
    results: list[RolloutResult] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)


class RolloutSampler:
    """Runs rounds of sampling on the env runners.

    Args:
        runners: the env runners.
        timeout_s: deadline of a round for which `start` is given none.
        grace_s: how long to wait for a first runner to come back when all have died.
    """

    def __init__(self, runners: EnvRunners, timeout_s: float, grace_s: float = RESTART_GRACE_S) -> None:
        self.runners = runners
        self._timeout_s, self._grace_s = timeout_s, grace_s
        self._preparing: list[tuple[int, ray.ObjectRef]] = []

    def start(self, tasks: Sequence[RolloutTask], timeout_s: float | None = None, at_once: int | None = None) -> Round:
        """Send tasks to the healthy runners, in turn, so that a task's place in the round decides its runner.

        Held-out ones may be bounded: `at_once` of them are played at a time, all runners together.
        """
        self._check_preparations()
        self.runners.probe()
        shards = list(self._deal(tasks, at_once))
        work = Round(timeout_s or self._timeout_s, at_once and at_once // max(len(shards), 1))
        for runner, shard in shards:
            self._send(work, runner, shard)
        return work

    def prepare(self, tasks: Sequence[RolloutTask]) -> None:
        """Let the runners open the episodes of a round that `start` will send. Returns at once."""
        self._preparing = [
            (runner, self.runners.actor(runner).prepare.remote(tasks=shard)) for runner, shard in self._deal(tasks)
        ]

    def _check_preparations(self) -> None:
        """Count runners that died while they prepared: they may be back already, and then their next call succeeds."""
        for runner, ref in self._preparing:
            if ray.wait([ref], timeout=0)[0]:
                try:
                    ray.get(ref, timeout=30)
                except RayTaskError as error:
                    logger.debug("runner %d could not prepare: %s", runner, error)
                except (RayActorError, GetTimeoutError, RayError):
                    self.runners.lost(runner)
        self._preparing = []

    def _deal(
        self, tasks: Sequence[RolloutTask], most_runners: int | None = None
    ) -> Iterator[tuple[int, list[RolloutTask]]]:
        runners = (self.runners.healthy() or self.runners.all())[:most_runners]
        for place, runner in enumerate(runners):
            shard = list(tasks[place :: len(runners)])
            if shard:
                yield runner, shard

    def _send(self, work: Round, runner: int, shard: list[RolloutTask]) -> None:
        ref = self.runners.actor(runner).sample.remote(tasks=shard, at_once=work.at_once)
        work.open[ref] = (runner, shard)

    def collect(
        self, work: Round, stop_requested: Callable[[], bool] = lambda: False
    ) -> tuple[list[TrajectoryGroup], RolloutResult]:
        """Wait for a round. Returns its groups in the order of their tasks and the merged counts.

        The shard of a runner that dies is given to another one. The round's deadline counts from here: time
        that the driver spent on other work before does not count, and finished results are always taken.
        Raises SamplingError, and RoundAbandonedError once `stop_requested()` is true.
        """
        deadline = time.monotonic() + work.timeout_s
        while work.open or work.waiting:
            if stop_requested():
                raise RoundAbandonedError("Sampling was stopped.")
            left = max(deadline - time.monotonic(), 0.0)
            if work.waiting and left:
                self._reassign(work, left, stop_requested)
                continue
            # Finished results are taken before the deadline is checked.
            ready = wait_for_some(list(work.open), min(left, _STOP_CHECK_S)) if work.open else []
            if not ready and not left:
                self._expire(work)
                break
            for ref in ready:
                runner, shard = work.open.pop(ref)
                try:
                    result: RolloutResult = ray.get(ref, timeout=30)
                except RayTaskError as error:
                    # The runner itself is alive: its code failed outside of any episode.
                    work.results.append(RolloutResult(lost={task.group_id: str(error.cause) for task in shard}))
                    work.dropped["runner_error"] += len(shard)
                except (RayActorError, GetTimeoutError, RayError):
                    self.runners.lost(runner)
                    work.waiting.append(shard)
                else:
                    work.results.append(result)
                    if result.needs_restart:
                        self.runners.restart(runner)
        return self._merge(work)

    def _reassign(self, work: Round, left: float, stop_requested: Callable[[], bool]) -> None:
        healthy = self.runners.healthy()
        deadline = time.monotonic() + min(left, self._grace_s)
        while not healthy:
            if stop_requested():
                raise RoundAbandonedError("Sampling was stopped.")
            if time.monotonic() > deadline:
                raise SamplingError("All env runners died and none came back: see the Ray logs of the env runners.")
            time.sleep(0.2)
            self.runners.probe()
            healthy = self.runners.healthy()
        busy = Counter(runner for runner, _ in work.open.values())
        for shard in work.waiting:
            runner = min(healthy, key=lambda candidate: busy[candidate])
            busy[runner] += 1
            self._send(work, runner, shard)
        work.waiting.clear()

    def _expire(self, work: Round) -> None:
        """The deadline has passed: tasks without a result are lost, and their runners are restarted."""
        for runner, shard in work.open.values():
            work.results.append(
                RolloutResult(lost={task.group_id: f"no result within {work.timeout_s:g} s" for task in shard})
            )
            work.dropped["round_timeout"] += len(shard)
            self.runners.restart(runner)
        for shard in work.waiting:
            work.results.append(RolloutResult(lost={task.group_id: "its env runner died" for task in shard}))
        work.open.clear()
        work.waiting.clear()

    def _merge(self, work: Round) -> tuple[list[TrajectoryGroup], RolloutResult]:
        merged = RolloutResult()
        dropped = Counter(work.dropped)
        if deaths := self.runners.take_deaths():
            dropped["runner_died"] += deaths
        timings: dict[str, float] = {}
        for result in work.results:
            merged.groups.extend(result.groups)
            merged.lost.update(result.lost)
            dropped.update(result.dropped)
            merged.retries += result.retries
            merged.spans += result.spans
            for name, seconds in result.timings.items():
                timings[name] = max(timings.get(name, 0.0), seconds)  # runners work side by side
        merged.dropped, merged.timings = dict(dropped), timings
        # Arrival order must not matter: group ids sort in the order in which the driver made them.
        merged.groups.sort(key=lambda group: group.group_id)
        return merged.groups, merged
