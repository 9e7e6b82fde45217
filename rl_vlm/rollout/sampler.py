"""The driver's side of sampling: deals tasks to env runners, collects groups, survives runners that die or hang."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.rllib.env.env_runner_group import EnvRunnerGroup

from rl_vlm.rollout.tasks import RolloutResult, RolloutTask
from rl_vlm.types import RLVLMError, TrajectoryGroup

# How often a wait looks up to see whether the user wants to stop.
_LOOK_UP_S = 0.5


class SamplingError(RLVLMError):
    """No env runner is left, or a round of sampling ran into its deadline."""


class RoundAbandonedError(RLVLMError):
    """The user asked to stop while a round was being sampled."""


@dataclass(slots=True)
class Round:
    """Tasks that are being sampled. `open` maps a running call to (runner id, its tasks)."""

    version: int
    started: float
    open: dict[ray.ObjectRef, tuple[int, list[RolloutTask]]] = field(default_factory=dict)
    waiting: list[list[RolloutTask]] = field(default_factory=list)  # shards without a runner
    results: list[RolloutResult] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    cursor: dict[str, Any] = field(default_factory=dict)  # the data cursor before this round took its items


class RolloutSampler:
    """Runs rounds of sampling on an RLlib env-runner group.

    Args:
        group: the env runners; actors that Ray restarts when they die.
        timeout_s: deadline of a round.
        restart_grace_s: how long to wait for a first runner to come back when all are gone.
    """

    def __init__(self, group: EnvRunnerGroup, timeout_s: float, restart_grace_s: float = 120.0) -> None:
        self._group = group
        self._timeout_s = timeout_s
        self._restart_grace_s = restart_grace_s
        self.restarts = 0

    @property
    def _manager(self) -> Any:
        return self._group._worker_manager

    def start(self, tasks: Sequence[RolloutTask], version: int) -> Round:
        """Send tasks to the healthy runners, dealt round so that runner and place in a round always agree."""
        self._revive()
        work = Round(version, time.monotonic())
        for runner, shard in self._deal(tasks):
            self._send(work, runner, shard)
        return work

    def prepare(self, tasks: Sequence[RolloutTask]) -> None:
        """Let the runners open the episodes of a round that `start` will send; nobody waits for it."""
        for runner, shard in self._deal(tasks):
            self._manager.actors()[runner].prepare.remote(tasks=shard)

    def _deal(self, tasks: Sequence[RolloutTask]) -> Iterator[tuple[int, list[RolloutTask]]]:
        runners = self._manager.healthy_actor_ids() or self._manager.actor_ids()
        for place, runner in enumerate(runners):
            shard = list(tasks[place :: len(runners)])
            if shard:
                yield runner, shard

    def _send(self, work: Round, runner: int, shard: list[RolloutTask]) -> None:
        ref = self._manager.actors()[runner].sample.remote(tasks=shard)
        work.open[ref] = (runner, shard)

    def collect(
        self, work: Round, stop_requested: Callable[[], bool] = lambda: False
    ) -> tuple[list[TrajectoryGroup], RolloutResult]:
        """Wait for a round. Returns its groups in the order of their tasks and the merged counts.

        The shard of a runner that dies is given to another one. Raises SamplingError, and RoundAbandonedError once
        `stop_requested()` is true.
        """
        while work.open or work.waiting:
            if stop_requested():
                raise RoundAbandonedError("Sampling was stopped.")
            left = self._timeout_s - (time.monotonic() - work.started)
            if left <= 0:
                self._give_up(work)
                break
            if work.waiting:
                self._reassign(work, left)
                continue
            ready, _ = ray.wait(list(work.open), num_returns=1, timeout=min(left, _LOOK_UP_S))
            for ref in ready:
                runner, shard = work.open.pop(ref)
                try:
                    result: RolloutResult = ray.get(ref, timeout=30)
                except RayTaskError as error:
                    # The runner itself is alive: its code failed outside of any episode.
                    work.results.append(RolloutResult(lost={task.group_id: str(error.cause) for task in shard}))
                    work.dropped["runner_error"] += len(shard)
                except (RayActorError, GetTimeoutError, RayError):
                    self._manager.set_actor_state(runner, healthy=False)
                    self.restarts += 1
                    work.dropped["runner_died"] += 1
                    work.waiting.append(shard)
                else:
                    work.results.append(result)
                    if result.needs_restart:
                        self._restart(runner)
        return self._merge(work)

    def _reassign(self, work: Round, left: float) -> None:
        healthy = self._manager.healthy_actor_ids()
        deadline = time.monotonic() + min(left, self._restart_grace_s)
        while not healthy:
            if time.monotonic() > deadline:
                raise SamplingError("All env runners died and none came back: see the Ray logs of the env runners.")
            time.sleep(0.2)
            self._revive()
            healthy = self._manager.healthy_actor_ids()
        busy = Counter(runner for runner, _ in work.open.values())
        for shard in work.waiting:
            runner = min(healthy, key=lambda candidate: busy[candidate])
            busy[runner] += 1
            self._send(work, runner, shard)
        work.waiting.clear()

    def _give_up(self, work: Round) -> None:
        """The deadline has passed: what has not come is lost, and its runners are restarted."""
        for runner, shard in work.open.values():
            work.results.append(
                RolloutResult(lost={task.group_id: f"no result within {self._timeout_s:g} s" for task in shard})
            )
            work.dropped["round_timeout"] += len(shard)
            self._restart(runner)
        for shard in work.waiting:
            work.results.append(RolloutResult(lost={task.group_id: "its env runner died" for task in shard}))
        work.open.clear()
        work.waiting.clear()

    def _restart(self, runner: int) -> None:
        """Kill a runner that an environment hangs in; Ray starts it again."""
        ray.kill(self._manager.actors()[runner], no_restart=False)
        self._manager.set_actor_state(runner, healthy=False)
        self.restarts += 1

    def _revive(self) -> None:
        """Ask the unhealthy runners whether they are back."""
        if self._manager.num_healthy_actors() < self._manager.num_actors():
            self._manager.probe_unhealthy_actors(timeout_seconds=1.0, mark_healthy=True)

    @staticmethod
    def _merge(work: Round) -> tuple[list[TrajectoryGroup], RolloutResult]:
        merged = RolloutResult()
        dropped = Counter(work.dropped)
        client: Counter[str] = Counter()
        timings: dict[str, float] = {}
        for result in work.results:
            merged.groups.extend(result.groups)
            merged.lost.update(result.lost)
            dropped.update(result.dropped)
            client.update(result.client)
            for name, seconds in result.timings.items():
                timings[name] = max(timings.get(name, 0.0), seconds)  # runners work side by side
        merged.dropped, merged.client, merged.timings = dict(dropped), dict(client), timings
        # Arrival order must not matter: group ids sort in the order in which the driver made them.
        merged.groups.sort(key=lambda group: group.group_id)
        return merged.groups, merged
