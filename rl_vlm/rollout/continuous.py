"""Continuous sampling: every group is a call of its own, so that a group is there when it is complete and not when its round is.

An env runner answers several calls at once in threads of its actor (`VLMEnvRunner.concurrent_calls`); calls beyond these wait
in Ray's queue in the runner's process. So a runner has work while the driver is busy with the learner, and nothing needs a
protocol of submitting and asking: a call that fails names the one group that is lost with it, forgetting a call is to forget
its reference, and no result can arrive twice.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from rl_vlm.rollout.runners import EnvRunners
from rl_vlm.rollout.sampler import RESTART_GRACE_S, SamplingError, wait_for_some
from rl_vlm.rollout.tasks import RolloutResult, RolloutTask

_PAUSE_S = 0.2  # between looks while no runner is up
_PROBE_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class _Call:
    """A task, when it is lost (on the clock of `ContinuousSampler._waited_s`; None before it runs), and who runs it."""

    task: RolloutTask
    due: float | None = None
    runner: int = 0
    life: int = 0


class ContinuousSampler:
    """Runs single tasks on the env runners and returns their groups in the order in which they complete.

    Args:
        runners: the env runners.
        timeout_s: deadline of one group. Only time in `collect` counts, as the driver may have been busy with other work, and
            only from when a runner has a place for the group.
        places: calls that a runner answers at once; it takes them in the order in which they were sent.
        grace_s: how long to wait for a first runner to come back when all have died.
    """

    def __init__(self, runners: EnvRunners, timeout_s: float, places: int, grace_s: float = RESTART_GRACE_S) -> None:
        self._runners, self._grace_s = runners, grace_s
        self._timeout_s, self._places = timeout_s, places
        self._open: dict[ray.ObjectRef, _Call] = {}
        self._waiting: list[_Call] = []  # tasks without a runner
        self._waited_s = 0.0
        self._none_up_s = 0.0

    def __len__(self) -> int:
        return len(self._open) + len(self._waiting)

    def versions(self) -> list[int]:
        """Of each task under way, the oldest version that may sample it."""
        return [call.task.min_version for call in (*self._open.values(), *self._waiting)]

    def give(self, tasks: Sequence[RolloutTask], version: int) -> None:
        """Send tasks to the runners; each is sampled by `version` or a newer one. Returns at once."""
        self._waiting += [_Call(task) for task in tasks]
        self._send(version)

    def clear(self) -> None:
        """Forget all tasks. Calls that run go on, and nobody looks at what they return."""
        self._open.clear()
        self._waiting.clear()

    def collect(self, version: int, wait_s: float) -> RolloutResult:
        """What has become complete, waiting up to `wait_s` for a first group. Tasks of runners that died are sent anew, for
        `version`. Raises SamplingError when all runners are gone and none comes back.
        """
        result = RolloutResult()
        dropped: Counter[str] = Counter()
        started = time.monotonic()
        self._runners.probe(at_most_every_s=_PROBE_EVERY_S)
        self._send(version)
        self._start_clocks()
        if self._open:
            for ref in wait_for_some(list(self._open), wait_s):
                self._take(ref, self._open.pop(ref), result, dropped)
        elif self._waiting:
            time.sleep(_PAUSE_S)
        self._waited_s += time.monotonic() - started
        self._expire(result, dropped)
        self._check_somebody_is_up(time.monotonic() - started)
        if deaths := self._runners.take_deaths():
            dropped["runner_died"] += deaths
        result.dropped = dict(dropped)
        return result

    def _send(self, version: int) -> None:
        healthy = self._runners.healthy()
        if not healthy or not self._waiting:
            return
        load = Counter(call.runner for call in self._open.values())
        least = [(load[runner], runner) for runner in healthy]  # a heap: there may be thousands of both
        heapq.heapify(least)
        for call in self._waiting:
            busy, runner = least[0]
            heapq.heapreplace(least, (busy + 1, runner))
            task = replace(call.task, min_version=version)
            ref = self._runners.actor(runner).sample.remote(tasks=[task])
            self._open[ref] = _Call(task, call.due, runner, self._runners.life(runner))
        self._waiting.clear()

    def _take(self, ref: ray.ObjectRef, call: _Call, result: RolloutResult, dropped: Counter[str]) -> None:
        current = call.life == self._runners.life(call.runner)
        try:
            one: RolloutResult = ray.get(ref, timeout=30)
        except RayTaskError as error:
            # The runner itself is alive: its code failed outside of any episode.
            result.lost[call.task.group_id] = str(error.cause)
            dropped["runner_error"] += 1
        except (RayActorError, GetTimeoutError, RayError):
            if current:
                self._runners.lost(call.runner)
            self._waiting.append(call)
        else:
            result.groups += one.groups
            result.lost |= one.lost
            result.retries += one.retries
            result.spans += one.spans
            dropped.update(one.dropped)
            for name, seconds in one.timings.items():
                result.timings[name] = result.timings.get(name, 0.0) + seconds
            if one.needs_restart and current:
                self._runners.restart(call.runner)

    def _placed(self) -> list[ray.ObjectRef]:
        """The calls that have one of their runner's places."""
        ahead: Counter[int] = Counter()
        found = []
        for ref, call in self._open.items():
            if ahead[call.runner] < self._places:
                found.append(ref)
            ahead[call.runner] += 1
        return found

    def _start_clocks(self) -> None:
        """The deadline of a group begins when its runner has a place for it; one that is sent anew keeps its own."""
        for ref in self._placed():
            if self._open[ref].due is None:
                self._open[ref] = replace(self._open[ref], due=self._waited_s + self._timeout_s)

    def _is_late(self, call: _Call) -> bool:
        return call.due is not None and call.due <= self._waited_s

    def _expire(self, result: RolloutResult, dropped: Counter[str]) -> None:
        """Tasks whose deadline has passed are lost. Runners where they had a place are restarted: their other calls are sent anew."""
        placed = set(self._placed())
        for ref, call in [(ref, call) for ref, call in self._open.items() if self._is_late(call)]:
            del self._open[ref]
            result.lost[call.task.group_id] = f"no result within {self._timeout_s:g} s"
            dropped["group_timeout"] += 1
            if ref in placed and call.life == self._runners.life(call.runner):
                self._runners.restart(call.runner)
        for call in [call for call in self._waiting if self._is_late(call)]:
            self._waiting.remove(call)
            result.lost[call.task.group_id] = "its env runner died"

    def _check_somebody_is_up(self, seconds: float) -> None:
        self._none_up_s = 0.0 if self._runners.healthy() else self._none_up_s + seconds
        if self._none_up_s > self._grace_s:
            raise SamplingError("All env runners died and none came back: see the Ray logs of the env runners.")
