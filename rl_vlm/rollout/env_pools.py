"""EnvPools: one pool of environments for each set of arguments that tasks ask for; pools that were not used for long are closed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from rl_vlm.config import RunConfig
from rl_vlm.envs.base import VisionEnv
from rl_vlm.envs.parts import make_part
from rl_vlm.rollout.env_pool import EnvPool
from rl_vlm.rollout.tasks import RolloutTask

# Threads of slow environments, which mostly wait: one for each episode as far as that goes.
_MIN_THREADS, _MAX_THREADS = 32, 256
# Pools without a group that are kept: an evaluation's variants, and what a curriculum set last.
_MAX_IDLE = 16
_UNCHANGED = json.dumps({})


class EnvPools:
    """The environments of a worker. A task's environment and its changed arguments name its pool."""

    def __init__(self, run: RunConfig) -> None:
        self._run = run
        self._pools: dict[tuple[str, str], EnvPool] = {}  # the least recently used first
        self._closed_busy_s = 0.0

    def __len__(self) -> int:
        return len(self._pools)

    def of(self, task: RolloutTask) -> EnvPool:
        """The pool whose environments play a task."""
        key = self._key(task)
        pool = self._pools.pop(key, None) or self._new(task)
        self._pools[key] = pool
        self._close_old(pool)
        return pool

    def close_surplus(self, tasks: Iterable[RolloutTask]) -> None:
        """Of the environments that played these held-out tasks, close those that training has no use for.

        It has none for changed arguments: those of a curriculum's stages come back as they are asked for.
        """
        for key in {self._key(task) for task in tasks} & self._pools.keys():
            self._pools[key].close_surplus(self._episodes if key[1] == _UNCHANGED else 0)

    def _changes(self, task: RolloutTask) -> dict[str, Any]:
        return {**self._run.variant_arguments(task.variant, task.env), **task.arguments}

    def _key(self, task: RolloutTask) -> tuple[str, str]:
        return task.env, json.dumps(self._changes(task), sort_keys=True)

    @property
    def _episodes(self) -> int:
        """Episodes that training plays at once here."""
        return self._run.rollout.groups_at_once * self._run.rollout.group_size

    def _new(self, task: RolloutTask) -> EnvPool:
        run = self._run
        env, changes = run.env, self._changes(task)

        def build() -> VisionEnv:
            if env.isolation == "process":
                from rl_vlm.envs.isolation import ProcessEnv

                part = env.parts[task.env]
                return ProcessEnv(part.id, part.make_kwargs(changes), step_timeout_s=env.step_timeout_s)
            return make_part(env, task.env, changes)

        return EnvPool(
            build,
            env.step_timeout_s,
            max_threads=min(max(self._episodes, _MIN_THREADS), _MAX_THREADS),
            inline=run.deterministic,
        )

    def _close_old(self, newest: EnvPool) -> None:
        # A pool whose environment hangs is kept, so that `stuck` shows it.
        idle = [key for key, pool in self._pools.items() if not pool.lent and not pool.stuck and pool is not newest]
        for key in idle[: max(len(idle) - _MAX_IDLE, 0)]:
            pool = self._pools.pop(key)
            self._closed_busy_s += pool.busy_s
            pool.close()

    @property
    def busy_s(self) -> float:
        """Seconds that environments worked, all pools together."""
        return self._closed_busy_s + sum(pool.busy_s for pool in self._pools.values())

    @property
    def stuck(self) -> bool:
        """Whether an environment hangs."""
        return any(pool.stuck for pool in self._pools.values())

    def close(self) -> None:
        """Close all environments; new ones are made as tasks need them."""
        for pool in self._pools.values():
            pool.close()
        self._pools = {}
        self._closed_busy_s = 0.0
