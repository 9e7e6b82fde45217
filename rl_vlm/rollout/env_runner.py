"""VLMEnvRunner: an env runner that drives many vision episodes at once with asyncio."""

from __future__ import annotations

import asyncio
from typing import Any

from rl_vlm.envs.base import ObservationSpace, TextSpace
from rl_vlm.models.loading import quiet_libraries
from rl_vlm.rollout.base_env_runner import RunEnvRunner
from rl_vlm.rollout.tasks import RolloutResult, RolloutTask
from rl_vlm.rollout.worker import RolloutWorker


class VLMEnvRunner(RunEnvRunner):
    """Samples trajectory groups from the served policy; the algorithm's `run_config` says everything."""

    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        super().__init__((ObservationSpace(), TextSpace()), config=config, **kwargs)
        quiet_libraries()
        run = self.config.run_config
        num_workers = max(run.rollout.num_env_runners, 1)
        assert self.config.model_folder is not None  # `GRPOConfig.prepare` has set it
        self._worker = RolloutWorker(run, self.config.run_id, self.config.model_folder, self.place, num_workers)
        self._loop = asyncio.new_event_loop()

    def sample(self, *, tasks: list[RolloutTask]) -> RolloutResult:
        """Sample all tasks at once. Failures are data in the result, never exceptions."""
        return self._loop.run_until_complete(self._worker.run(tasks))

    def prepare(self, *, tasks: list[RolloutTask]) -> None:
        """Open the episodes that the next `sample` will be asked for."""
        self._loop.run_until_complete(self._worker.prepare(tasks))

    def stop(self) -> None:
        """Close the environments."""
        self._worker.close_envs()
