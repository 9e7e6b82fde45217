"""The driver's side of sampling: sends tasks to env runners, and takes their groups."""

from __future__ import annotations

import heapq
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import ray
from ray.exceptions import RayError, RayTaskError

from rl_vlm.rollout.actors import ActorPool
from rl_vlm.rollout.tasks import RolloutResult, RolloutTask, merged
from rl_vlm.types import RLVLMError

STOP_CHECK_S = 0.5  # how often a wait checks whether the user wants to stop
RESTART_GRACE_S = 120.0  # the longest time that a process takes to come back on a machine that is there
_PAUSE_S = 0.2  # between looks while no runner is up
_PROBE_EVERY_S = 2.0


class SamplingError(RLVLMError):
    """No env runner is left, or no group was completed for too long.

    Do: read the env runners' logs of Ray, then `--resume`.
    """


class RoundAbandonedError(RLVLMError):
    """The user asked to stop while groups were being sampled.

    Do: nothing: the run saves a checkpoint.
    """


@dataclass(slots=True)
class _Call:
    """Tasks that one call samples. At `due`, by `Sampler._waited_s`, they are lost; None before they run."""

    tasks: list[RolloutTask]  # none where episodes are opened ahead
    timeout_s: float = 0.0
    due: float | None = None
    runner: int = 0
    life: int = 0

    def lost(self, why: str, count_as: str = "") -> RolloutResult:
        """The result of a call that will never have one."""
        dropped = {count_as: len(self.tasks)} if count_as and self.tasks else {}
        return RolloutResult(lost={task.group_id: why for task in self.tasks}, dropped=dropped)


class Sampler:
    """Samples tasks on the env runners.

    A call holds a runner's shard of a round (`sharded`), or a single task, whose group then does not wait for its
    round. A runner answers several calls at once in threads of its actor (`VLMEnvRunner.concurrent_calls`); further
    calls wait in Ray's queue in its process, so it has work while the driver is busy with the learner. A call that
    fails names the groups that are lost with it, and no result can arrive twice.

    A call's deadline counts only the time that the driver spends waiting here, from when a runner has a place for the
    call. An answer from an earlier life of a runner says nothing about its health now.

    Args:
        sharded: give each runner its share of the tasks in one call; otherwise the idlest runner gets each task.
        places: calls that a runner answers at once, in the order in which they were sent.
        grace_s: how long to wait for a first runner to come back when all have died.
    """

    def __init__(self, runners: ActorPool, sharded: bool, places: int = 1, grace_s: float = RESTART_GRACE_S) -> None:
        self.runners = runners
        self._sharded, self._places, self._grace_s = sharded, places, grace_s
        self._open: dict[ray.ObjectRef, _Call] = {}
        self._waiting: list[_Call] = []  # without a runner
        self._waited_s = self._none_up_s = 0.0

    def __len__(self) -> int:
        return len(self.versions())

    def versions(self) -> list[int]:
        """Of each task under way, the oldest version that may sample it."""
        return [task.min_version for call in (*self._open.values(), *self._waiting) for task in call.tasks]

    def give(self, tasks: Sequence[RolloutTask], timeout_s: float, version: int | None = None) -> None:
        """Send tasks to the runners; each is sampled by `version` (None: its own) or a newer one. Returns at once."""
        self.runners.probe(_PROBE_EVERY_S)
        shards = self._shards(tasks) if self._sharded else [[task] for task in tasks]
        self._waiting += [_Call(shard, timeout_s) for shard in shards]
        self._send(version)

    def open_ahead(self, tasks: Sequence[RolloutTask]) -> None:
        """Let the runners open the episodes of tasks that will be given next. Returns at once."""
        for runner, shard in zip(self.runners.usable, self._shards(tasks), strict=False):
            ref = self.runners[runner].open_ahead.remote(tasks=shard)
            self._open[ref] = _Call([], runner=runner, life=self.runners.lives[runner])

    def clear(self) -> None:
        """Forget all tasks. Calls that run go on, and what they return is ignored."""
        self._open.clear()
        self._waiting.clear()

    def collect(self, version: int, wait_s: float) -> RolloutResult:
        """What has become complete, waiting up to `wait_s` for a first answer. Tasks of runners that died are sent
        anew, for `version`. Raises SamplingError when all runners are gone and none comes back."""
        return merged(self._answers(version, wait_s))

    def finish(self, stop_requested: Callable[[], bool] = lambda: False) -> RolloutResult:
        """Wait for all tasks; the result's seconds are the slowest call's. Raises SamplingError, and
        RoundAbandonedError once `stop_requested()` is true; nothing is under way then."""
        answers: list[RolloutResult] = []
        try:
            while len(self):
                if stop_requested():
                    raise RoundAbandonedError("Sampling was stopped.")
                answers += self._answers(None, STOP_CHECK_S)
        finally:
            self.clear()
        seconds = max((answer.seconds for answer in answers), default=0.0)
        return replace(merged(answers), seconds=seconds)

    def _answers(self, version: int | None, wait_s: float) -> list[RolloutResult]:
        started = time.monotonic()
        self.runners.probe(_PROBE_EVERY_S)
        self._send(version)
        self._place()
        answers: list[RolloutResult] = []
        if self._open:
            due = min((call.due for call in self._open.values() if call.due is not None), default=math.inf)
            ready = _complete(list(self._open), max(min(wait_s, due - self._waited_s), 0.0))
            answers += [self._answer(ref, self._open.pop(ref)) for ref in ready]
        elif self._waiting:
            time.sleep(_PAUSE_S)
        self._waited_s += time.monotonic() - started
        answers += self._expire()
        self._none_up_s = 0.0 if self.runners.healthy else self._none_up_s + time.monotonic() - started
        if self._none_up_s > self._grace_s:
            raise SamplingError("All env runners died and none came back: see the Ray logs of the env runners.")
        if deaths := self.runners.take_deaths():
            answers.append(RolloutResult(dropped={"runner_died": deaths}))
        return answers

    def _shards(self, tasks: Sequence[RolloutTask]) -> list[list[RolloutTask]]:
        """Tasks dealt to the runners in turn, so that a task's place decides its runner."""
        count = min(len(self.runners.usable), len(tasks))
        return [list(tasks[k::count]) for k in range(count)]

    def _send(self, version: int | None) -> None:
        healthy = self.runners.healthy
        if not healthy:
            return
        load = Counter(call.runner for call in self._open.values() if call.tasks)
        least = [(load[runner], runner) for runner in healthy]  # a heap: there may be thousands of both
        heapq.heapify(least)
        for call in self._waiting:
            busy, call.runner = least[0]
            heapq.heapreplace(least, (busy + 1, call.runner))
            call.life = self.runners.lives[call.runner]
            if version is not None:
                call.tasks = [replace(task, min_version=version) for task in call.tasks]
            self._open[self.runners[call.runner].sample.remote(tasks=call.tasks)] = call
        self._waiting.clear()

    def _answer(self, ref: ray.ObjectRef, call: _Call) -> RolloutResult:
        try:
            result: RolloutResult = ray.get(ref, timeout=30) or RolloutResult()  # None: episodes were opened
        except RayTaskError as error:  # the runner is alive: its code failed outside of any episode
            return call.lost(str(error.cause), "runner_error")
        except RayError:  # the runner is gone, or does not hand over what it has
            if self._is_current(call):
                self.runners.lose(call.runner)
            self._waiting += [call] if call.tasks else []
            return RolloutResult()
        if result.needs_restart and self._is_current(call):
            self.runners.restart(call.runner)
        return result

    def _is_current(self, call: _Call) -> bool:
        """Whether the runner that got this call has not died since."""
        return call.life == self.runners.lives[call.runner]

    def _place(self) -> set[ray.ObjectRef]:
        """The calls that have one of their runner's places; their clocks run. One sent anew keeps its deadline."""
        ahead: Counter[int] = Counter()
        placed = set()
        for ref, call in self._open.items():
            if call.tasks and ahead[call.runner] < self._places:
                placed.add(ref)
                if call.due is None:
                    call.due = self._waited_s + call.timeout_s
            ahead[call.runner] += bool(call.tasks)
        return placed

    def _expire(self) -> list[RolloutResult]:
        """Tasks whose deadline has passed are lost. The runners that had them restart: other calls are sent anew."""
        count_as = "round_timeout" if self._sharded else "group_timeout"
        expired = []
        placed = self._place()
        for ref, call in list(self._open.items()):
            if self._is_late(call):
                del self._open[ref]
                expired.append(call.lost(f"no result within {call.timeout_s:g} s", count_as))
                if ref in placed and self._is_current(call):
                    self.runners.restart(call.runner)
        expired += [call.lost("its env runner died") for call in self._waiting if self._is_late(call)]
        self._waiting = [call for call in self._waiting if not self._is_late(call)]
        return expired

    def _is_late(self, call: _Call) -> bool:
        return call.due is not None and call.due <= self._waited_s


def _complete(calls: list[ray.ObjectRef], timeout_s: float) -> list[ray.ObjectRef]:
    """The calls that are complete, once one is; none when none is within `timeout_s`.

    `ray.wait` looks at all calls and returns no more than it was asked for: one by one, N calls would cost N² looks.
    """
    ready, others = ray.wait(calls, num_returns=1, timeout=timeout_s)
    if ready and others:
        ready += ray.wait(others, num_returns=len(others), timeout=0)[0]
    return ready
