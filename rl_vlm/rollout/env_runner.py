"""VLMEnvRunner: an RLlib env runner that drives many vision episodes at once with asyncio."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import gymnasium
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.env import INPUT_ENV_SPACES
from ray.rllib.env.env_runner import EnvRunner

from rl_vlm.config import RunConfig
from rl_vlm.envs.base import ObservationSpace, TextSpace, VisionEnv
from rl_vlm.envs.registry import make
from rl_vlm.models.loading import load_text_side, quiet_libraries
from rl_vlm.rollout.env_pool import EnvPool
from rl_vlm.rollout.episodes import EpisodeLimits, GroupFailedError, run_group
from rl_vlm.rollout.retry import RetryPolicy
from rl_vlm.rollout.tasks import RolloutResult, RolloutTask
from rl_vlm.serving.client import PolicyClient
from rl_vlm.types import TrajectoryGroup

# Answers up to this many tokens are so short that a Serve call costs more than waiting for the slowest of a batch.
_COALESCE_UP_TO_TOKENS = 128


class VLMEnvRunner(EnvRunner):
    """Samples trajectory groups from the served policy.

    The algorithm's `run_config` says everything; `sample(tasks)` returns a `RolloutResult`. Nothing that an environment
    or a request does leaves `sample` as an exception: failures are data.
    """

    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        quiet_libraries()
        run: RunConfig = self.config.run_config
        self._run = run
        self._text = load_text_side(self.config.model_folder)
        self._limits = EpisodeLimits(
            max_turns=run.rollout.max_turns,
            max_new_tokens_per_turn=run.rollout.max_new_tokens_per_turn,
            max_new_tokens=run.rollout.max_new_tokens,
            max_context=run.serving.max_context,
            require_end_of_turn=run.rollout.require_end_of_turn,
        )
        self._retry = RetryPolicy(run.rollout.group_retries + 1)
        self._loop = asyncio.new_event_loop()
        self._client: PolicyClient | None = None
        self._pools: dict[str, EnvPool] = {}
        self.make_env()

    def make_env(self) -> None:
        """Forget all environments; new ones are made as tasks need them."""
        for pool in self._pools.values():
            pool.close()
        self._pools = {}

    def _pool(self, variant: str) -> EnvPool:
        if variant not in self._pools:
            env = self._run.env
            kwargs = env.make_kwargs(self._run.evaluation.variants.get(variant))

            def build() -> VisionEnv:
                if env.isolation == "process":
                    from rl_vlm.envs.isolation import ProcessEnv

                    return ProcessEnv(env.id, kwargs, step_timeout_s=env.step_timeout_s)
                return make(env.id, **kwargs)

            self._pools[variant] = EnvPool(build, env.step_timeout_s, inline=self._run.deterministic)
        return self._pools[variant]

    def sample(self, *, tasks: list[RolloutTask], **_: Any) -> RolloutResult:  # type: ignore[override]
        """Sample all tasks at once."""
        return self._loop.run_until_complete(self._sample(tasks))

    async def _sample(self, tasks: list[RolloutTask]) -> RolloutResult:
        started = time.perf_counter()
        if self._client is None:
            serving = self._run.serving
            self._client = PolicyClient(
                self.config.run_id,
                deadline_s=serving.request_timeout_s,
                # Lock-step: one call at a time holds all episodes, so that batches repeat exactly.
                num_replicas=1 if self._run.deterministic else serving.num_replicas,
                coalesce=self._run.deterministic or self._limits.max_new_tokens_per_turn <= _COALESCE_UP_TO_TOKENS,
            )
        result = RolloutResult()
        dropped: Counter[str] = Counter()
        calls, retries = self._client.stats.calls, self._client.stats.retries
        busy = sum(pool.busy_s for pool in self._pools.values())
        outcomes = await asyncio.gather(*(self._attempt(task, dropped) for task in tasks))
        for task, outcome in zip(tasks, outcomes, strict=True):
            if isinstance(outcome, TrajectoryGroup):
                result.groups.append(outcome)
            else:
                result.lost[task.group_id] = outcome
        result.dropped = dict(dropped)
        result.client = {"calls": self._client.stats.calls - calls, "retries": self._client.stats.retries - retries}
        result.timings = {
            "sample": time.perf_counter() - started,
            "env": sum(pool.busy_s for pool in self._pools.values()) - busy,
        }
        result.needs_restart = any(pool.stuck for pool in self._pools.values())
        return result

    async def _attempt(self, task: RolloutTask, dropped: Counter[str]) -> TrajectoryGroup | str:
        assert self._client is not None
        attempt = 0
        while True:
            try:
                return await run_group(task, self._pool(task.variant), self._client, self._text, self._limits)
            except GroupFailedError as error:
                dropped[error.reason] += 1
                if not self._retry.again(attempt):
                    return str(error)
            except Exception as error:  # noqa: BLE001 - user code and Serve may raise anything; it must not end the runner
                dropped["unexpected"] += 1
                if not self._retry.again(attempt):
                    return f"{type(error).__name__}: {error}"
            attempt += 1

    def assert_healthy(self) -> None:
        """RLlib asks after construction."""
        assert self._text is not None

    def get_spaces(self) -> dict[str, tuple[gymnasium.Space[Any], gymnasium.Space[Any]]]:
        """Observation and action space, under RLlib's keys."""
        spaces = (ObservationSpace(), TextSpace())
        return {INPUT_ENV_SPACES: spaces, DEFAULT_MODULE_ID: spaces}

    def get_metrics(self) -> dict[str, Any]:
        """Nothing: figures travel with the results of `sample`."""
        return {}

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Runners hold no state: the driver owns the data cursor, Serve the weights."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """See `get_state`."""

    def stop(self) -> None:
        """Close the environments."""
        self.make_env()
