"""Simulated env runners and replicas for scale.py: what the real parts of a run see of thousands of them."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import ray

from rl_vlm.rollout.actors import ActorPool
from rl_vlm.rollout.tasks import RolloutResult, RolloutTask
from rl_vlm.serving.registry import Changes
from rl_vlm.types import POLICY, StopReason, Trajectory, TrajectoryGroup, TrajectoryStatus, Turn

HOSTS = 2  # processes that the simulated runners, or replicas, live in
TOKENS = 512  # of an episode


def group(task: RolloutTask) -> TrajectoryGroup:
    """What a runner returns for a task: episodes of one turn."""
    mask = np.zeros(TOKENS, bool)
    mask[TOKENS // 2 :] = True
    turn = Turn(TOKENS // 2, TOKENS, task.min_version, StopReason.STOP, 1.0)
    return TrajectoryGroup(
        task.group_id,
        task.index,
        [
            Trajectory(
                f"{task.group_id}/{k}",
                np.arange(TOKENS, dtype=np.int32),
                mask,
                np.full(TOKENS, -1.0, np.float32),
                (turn,),
                TrajectoryStatus.COMPLETED,
            )
            for k in range(task.size)
        ],
    )


@ray.remote(num_cpus=0, max_concurrency=100_000)
class RunnerHost:
    """Many simulated env runners in one process: each group takes a random time (log-normal, median `seconds`)."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._chosen = seconds, random.Random(0)

    async def ping(self) -> None:
        """As `VLMEnvRunner.ping`."""

    async def sample(self, tasks: list[RolloutTask]) -> RolloutResult:
        """As `VLMEnvRunner.sample`."""
        await asyncio.sleep(self._seconds * self._chosen.lognormvariate(0.0, 0.5) * len(tasks))
        return RolloutResult(groups=[group(task) for task in tasks], seconds=self._seconds)


class _Runner:
    """An actor handle as the samplers use it."""

    def __init__(self, host: Any) -> None:
        self.sample, self.ping = host.sample, host.ping


def runners(count: int, seconds: float) -> tuple[ActorPool, list[Any]]:
    """Simulated env runners below the real bookkeeping, and the actors to kill at the end."""
    hosts = [RunnerHost.remote(seconds) for _ in range(HOSTS)]
    ray.get([host.__ray_ready__.remote() for host in hosts], timeout=60)
    return ActorPool({k: _Runner(hosts[k % HOSTS]) for k in range(count)}), hosts


async def follow(registry: Any, replica: str, ended: asyncio.Event) -> None:
    """One replica: waits for versions, loads them in no time, and acknowledges them."""
    since = None
    while not ended.is_set():
        changes: Changes | None = await registry.watch.remote(replica, since, {})
        since = changes.revision if changes is not None else since
        if changes is not None and (found := changes.newest.get(POLICY)) is not None:
            await registry.ack.remote(replica, POLICY, found.version, found.sha256)


@ray.remote(num_cpus=0, max_concurrency=100_000)
class ReplicaHost:
    """Many simulated replicas in one process."""

    async def run(self, registry: Any, names: list[str]) -> None:
        """Follow the registry until `stop`."""
        self._ended = asyncio.Event()
        await asyncio.gather(*(follow(registry, name, self._ended) for name in names))

    async def stop(self) -> None:
        """End all of them at their next answer."""
        self._ended.set()
