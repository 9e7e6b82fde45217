"""VLMEnvRunner: an RLlib env runner that drives many vision episodes at once with asyncio."""

from __future__ import annotations

import asyncio
from typing import Any

import gymnasium
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.env import INPUT_ENV_SPACES
from ray.rllib.env.env_runner import EnvRunner

from rl_vlm.envs.base import ObservationSpace, TextSpace
from rl_vlm.models.loading import quiet_libraries
from rl_vlm.rollout.tasks import RolloutResult, RolloutTask
from rl_vlm.rollout.worker import RolloutWorker


class VLMEnvRunner(EnvRunner):
    """Samples trajectory groups from the served policy; the algorithm's `run_config` says everything."""

    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        quiet_libraries()
        run = self.config.run_config
        place = max(int(kwargs.get("worker_index", 1)) - 1, 0)  # RLlib counts remote runners from 1
        num_workers = max(run.rollout.num_env_runners, 1)
        self._worker = RolloutWorker(run, self.config.run_id, self.config.model_folder, place, num_workers)
        self._loop = asyncio.new_event_loop()

    def make_env(self) -> None:
        """Forget all environments; new ones are made as tasks need them."""
        self._worker.close_envs()

    def sample(self, *, tasks: list[RolloutTask], **_: Any) -> RolloutResult:  # type: ignore[override]
        """Sample all tasks at once. Failures are data in the result, never exceptions."""
        return self._loop.run_until_complete(self._worker.run(tasks))

    def prepare(self, *, tasks: list[RolloutTask]) -> None:
        """Open the episodes that the next `sample` will be asked for."""
        self._loop.run_until_complete(self._worker.prepare(tasks))

    def assert_healthy(self) -> None:
        """RLlib asks after construction."""
        assert self._worker is not None

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
