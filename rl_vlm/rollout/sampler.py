"""The driver's side of sampling: it sends tasks to env runners, takes their groups, and replaces runners that die or
hang."""

from __future__ import annotations

import heapq
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from rl_vlm.rollout.tasks import RolloutResult, RolloutTask
from rl_vlm.types import RLVLMError

_PROBE_WAIT_S = 1.0  # a probe waits for the runners that do not answer yet


class EnvRunners:
    """The env runners: which are up, and how often they died. A death is counted once, however many calls fail with it.

    Args:
        group: actors that Ray restarts when they die.
    """

    def __init__(self, group: EnvRunnerGroup) -> None:
        self._group = group
        # Runners that died or were killed and have not come back; their deaths are counted.
        self._down: set[int] = set()
        self._deaths = 0  # not yet reported
        self._lives: Counter[int] = Counter()
        self._probed = 0.0
        self.restarts = 0

    @property
    def _manager(self) -> Any:
        return self._group._worker_manager

    def actor(self, runner: int) -> Any:
        """The handle of a runner."""
        return self._manager.actors()[runner]

    def all(self) -> list[int]:
        """The ids of all runners."""
        return list(self._manager.actor_ids())

    def healthy(self) -> list[int]:
        """The ids of the runners that are up as far as is known."""
        return list(self._manager.healthy_actor_ids())

    def life(self, runner: int) -> int:
        """How often this runner has died: what a call to an earlier life says about health is out of date."""
        return self._lives[runner]

    def lost(self, runner: int) -> None:
        """Count a runner that died, until it is back."""
        self._manager.set_actor_state(runner, healthy=False)
        if runner not in self._down:
            self._down.add(runner)
            self._lives[runner] += 1
            self._deaths += 1
            self.restarts += 1

    def restart(self, runner: int) -> None:
        """Kill a runner in which an environment hangs; Ray starts it again."""
        ray.kill(self.actor(runner), no_restart=False)
        self._manager.set_actor_state(runner, healthy=False)
        self._down.add(runner)
        self._lives[runner] += 1
        self.restarts += 1

    def probe(self, at_most_every_s: float = 0.0) -> None:
        """Look whether runners that are down are back, including those that RLlib has marked."""
        for runner in self._unhealthy():
            self.lost(runner)
        if self._down and time.monotonic() - self._probed >= at_most_every_s:
            self._manager.probe_unhealthy_actors(timeout_seconds=_PROBE_WAIT_S, mark_healthy=True)
            self._probed = time.monotonic()
            self._down &= self._unhealthy()

    def take_deaths(self) -> int:
        """How many runners died since the last call."""
        deaths, self._deaths = self._deaths, 0
        return deaths

    def _unhealthy(self) -> set[int]:
        return set(self.all()) - set(self.healthy())


# Each call of a runner holds a shard of a round (`sharded`) or a single task, whose group is then there when it is
# complete and not when its round is. An env runner answers several calls at once in threads of its actor
# (`VLMEnvRunner.concurrent_calls`); further calls wait in Ray's queue in the runner's process. So a runner has work
# while the driver is busy with the learner. A call that fails names the groups that are lost with it, and no result
# can arrive twice.

logger = logging.getLogger(__name__)

STOP_CHECK_S = 0.5  # how often a wait checks whether the user wants to stop
RESTART_GRACE_S = 120.0  # how long a process takes to come back at most, on a machine that is there
_PAUSE_S = 0.2  # between looks while no runner is up
_PROBE_EVERY_S = 2.0


class SamplingError(RLVLMError):
    """No env runner is left, or no group was completed for too long."""


class RoundAbandonedError(RLVLMError):
    """The user asked to stop while groups were being sampled."""


@dataclass(frozen=True, slots=True)
class _Call:
    """Tasks that one call samples, when they are lost (on the clock of `Sampler._waited_s`; None before they run), and
    who runs them."""

    tasks: list[RolloutTask]
    timeout_s: float
    due: float | None = None
    runner: int = 0
    life: int = 0

    def lost(self, why: str, count_as: str = "") -> RolloutResult:
        """The result of a call that will never have one."""
        dropped = {count_as: len(self.tasks)} if count_as else {}
        return RolloutResult(lost={task.group_id: why for task in self.tasks}, dropped=dropped)


class Sampler:
    """Samples tasks on the env runners.

    Only time in `collect` and `finish` counts towards a call's deadline, as the driver may have been busy with other
    work, and only from when a runner has a place for the call. An answer from an earlier life of a runner says nothing
    about its health now.

    Args:
        runners: the env runners.
        sharded: give each runner its share of the tasks in one call; otherwise each task is a call, and the idlest
        runner gets it.
        places: calls that a runner answers at once; it takes them in the order in which they were sent.
        grace_s: how long to wait for a first runner to come back when all have died.
    """

    def __init__(self, runners: EnvRunners, sharded: bool, places: int = 1, grace_s: float = RESTART_GRACE_S) -> None:
        self.runners = runners
        self._sharded, self._places, self._grace_s = sharded, places, grace_s
        self._open: dict[ray.ObjectRef, _Call] = {}
        self._waiting: list[_Call] = []  # without a runner
        self._opening: list[tuple[int, ray.ObjectRef]] = []  # runners that open episodes ahead
        self._waited_s = self._none_up_s = 0.0

    def __len__(self) -> int:
        return sum(len(call.tasks) for call in (*self._open.values(), *self._waiting))

    def versions(self) -> list[int]:
        """Of each task under way, the oldest version that may sample it."""
        return [task.min_version for call in (*self._open.values(), *self._waiting) for task in call.tasks]

    def give(self, tasks: Sequence[RolloutTask], timeout_s: float, version: int | None = None) -> None:
        """Send tasks to the runners; each is sampled by `version` (None: its own) or a newer one. Returns at once."""
        self._check_openings()
        self.runners.probe(_PROBE_EVERY_S)
        shards = self._shards(tasks) if self._sharded else [[task] for task in tasks]
        self._waiting += [_Call(shard, timeout_s) for shard in shards]
        self._send(version)

    def open_ahead(self, tasks: Sequence[RolloutTask]) -> None:
        """Let the runners open the episodes of tasks that will be given next. Returns at once."""
        runners = self.runners.healthy() or self.runners.all()
        self._opening = [
            (runner, self.runners.actor(runner).open_ahead.remote(tasks=shard))
            for runner, shard in zip(runners, self._shards(tasks), strict=False)
        ]

    def clear(self) -> None:
        """Forget all tasks. Calls that run go on, and nobody looks at what they return."""
        self._open.clear()
        self._waiting.clear()

    def collect(self, version: int, wait_s: float) -> RolloutResult:
        """What has become complete, waiting up to `wait_s` for a first answer. Tasks of runners that died are sent
        anew, for `version`. Raises SamplingError when all runners are gone and none comes back.
        """
        return merged(self._answers(version, wait_s), sum)

    def finish(self, stop_requested: Callable[[], bool] = lambda: False) -> RolloutResult:
        """Wait for all tasks.

        The groups are sorted by their ids, whatever the order in which they arrived; seconds are the slowest runner's.

        Raises SamplingError, and RoundAbandonedError once `stop_requested()` is true; nothing is under way then.
        """
        answers: list[RolloutResult] = []
        try:
            while len(self):
                if stop_requested():
                    raise RoundAbandonedError("Sampling was stopped.")
                answers += self._answers(None, STOP_CHECK_S)
        finally:
            self.clear()
        return merged(answers, lambda seconds: max(seconds, default=0.0))

    def _answers(self, version: int | None, wait_s: float) -> list[RolloutResult]:
        started = time.monotonic()
        self.runners.probe(_PROBE_EVERY_S)
        self._send(version)
        self._start_clocks()
        answers: list[RolloutResult] = []
        if self._open:
            dues = (call.due for call in self._open.values() if call.due is not None)
            wait_s = min(wait_s, max(min(dues, default=wait_s) - self._waited_s, 0.0))
            answers += [self._answer(ref, self._open.pop(ref)) for ref in _complete(list(self._open), wait_s)]
        elif self._waiting:
            time.sleep(_PAUSE_S)
        self._waited_s += time.monotonic() - started
        answers += self._expire()
        self._none_up_s = 0.0 if self.runners.healthy() else self._none_up_s + time.monotonic() - started
        if self._none_up_s > self._grace_s:
            raise SamplingError("All env runners died and none came back: see the Ray logs of the env runners.")
        if deaths := self.runners.take_deaths():
            answers.append(RolloutResult(dropped={"runner_died": deaths}))
        return answers

    def _shards(self, tasks: Sequence[RolloutTask]) -> list[list[RolloutTask]]:
        """Tasks dealt to the runners in turn, so that a task's place decides its runner."""
        count = min(len(self.runners.healthy() or self.runners.all()), len(tasks))
        return [list(tasks[k::count]) for k in range(count)]

    def _send(self, version: int | None) -> None:
        healthy = self.runners.healthy()
        if not healthy or not self._waiting:
            return
        load = Counter(call.runner for call in self._open.values())
        least = [(load[runner], runner) for runner in healthy]  # a heap: there may be thousands of both
        heapq.heapify(least)
        for call in self._waiting:
            busy, runner = least[0]
            heapq.heapreplace(least, (busy + 1, runner))
            tasks = call.tasks if version is None else [replace(task, min_version=version) for task in call.tasks]
            ref = self.runners.actor(runner).sample.remote(tasks=tasks)
            self._open[ref] = replace(call, tasks=tasks, runner=runner, life=self.runners.life(runner))
        self._waiting.clear()

    def _answer(self, ref: ray.ObjectRef, call: _Call) -> RolloutResult:
        try:
            result: RolloutResult = ray.get(ref, timeout=30)
        except RayTaskError as error:
            # The runner itself is alive: its code failed outside of any episode.
            return call.lost(str(error.cause), "runner_error")
        except (RayActorError, GetTimeoutError, RayError):
            if self._is_current(call):
                self.runners.lost(call.runner)
            self._waiting.append(call)
            return RolloutResult()
        if result.needs_restart and self._is_current(call):
            self.runners.restart(call.runner)
        return result

    def _is_current(self, call: _Call) -> bool:
        """Whether the runner that got this call has not died since."""
        return call.life == self.runners.life(call.runner)

    def _placed(self) -> list[ray.ObjectRef]:
        """The calls that have one of their runner's places."""
        ahead: Counter[int] = Counter()
        placed = []
        for ref, call in self._open.items():
            if ahead[call.runner] < self._places:
                placed.append(ref)
            ahead[call.runner] += 1
        return placed

    def _start_clocks(self) -> None:
        """A call that is sent anew keeps its own deadline."""
        for ref in self._placed():
            call = self._open[ref]
            if call.due is None:
                self._open[ref] = replace(call, due=self._waited_s + call.timeout_s)

    def _expire(self) -> list[RolloutResult]:
        """Tasks whose deadline has passed are lost.

        Runners where they had a place are restarted: their other calls are sent anew.
        """
        count_as = "round_timeout" if self._sharded else "group_timeout"
        expired = []
        placed = set(self._placed())
        for ref, call in [(ref, call) for ref, call in self._open.items() if self._is_late(call)]:
            del self._open[ref]
            expired.append(call.lost(f"no result within {call.timeout_s:g} s", count_as))
            if ref in placed and self._is_current(call):
                self.runners.restart(call.runner)
        for call in [call for call in self._waiting if self._is_late(call)]:
            self._waiting.remove(call)
            expired.append(call.lost("its env runner died"))
        return expired

    def _is_late(self, call: _Call) -> bool:
        return call.due is not None and call.due <= self._waited_s

    def _check_openings(self) -> None:
        """Count runners that died while they opened episodes: they may be back already, and then their next call
        succeeds."""
        for runner, ref in self._opening:
            if ray.wait([ref], timeout=0)[0]:
                try:
                    ray.get(ref, timeout=30)
                except RayTaskError as error:
                    logger.debug("runner %d could not open episodes ahead: %s", runner, error)
                except (RayActorError, GetTimeoutError, RayError):
                    self.runners.lost(runner)
        self._opening = []


def merged(results: Sequence[RolloutResult], timing: Callable[[Iterable[float]], float]) -> RolloutResult:
    """Several results as one; `timing` combines the seconds of the calls."""
    whole, dropped = RolloutResult(), Counter[str]()
    for result in results:
        whole.groups += result.groups
        whole.lost |= result.lost
        whole.retries += result.retries
        whole.spans += result.spans
        dropped.update(result.dropped)
    whole.dropped = dict(dropped)
    whole.seconds = timing(result.seconds for result in results)
    # Arrival order must not matter: group ids sort in the order in which the driver made them.
    whole.groups.sort(key=lambda group: group.group_id)
    return whole


def _complete(calls: list[ray.ObjectRef], timeout_s: float) -> list[ray.ObjectRef]:
    """The calls that are complete, once one is; none when none is within `timeout_s`.

    `ray.wait` looks at all calls and returns no more than it was asked for: one by one, N calls would cost N² looks.
    """
    ready, others = ray.wait(calls, num_returns=1, timeout=timeout_s)
    if ready and others:
        ready += ray.wait(others, num_returns=len(others), timeout=0)[0]
    return ready
