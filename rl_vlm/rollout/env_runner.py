"""VLMEnvRunner: an env runner that drives many vision episodes at once with asyncio.

With a policy lag the actor answers several calls at once, one per group, in threads (`concurrent_calls`); all of them run on one event
loop, in a thread of its own. Threads and not coroutines: a coroutine anywhere in the class would make it an asynchronous actor,
whose health checks and calls at lag 0 would then share the loop with user code.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from functools import partial
from typing import Any, TypeVar

from rl_vlm.config import RunConfig
from rl_vlm.envs.base import ObservationSpace, TextSpace
from rl_vlm.models.loading import quiet_libraries
from rl_vlm.rollout.base_env_runner import RunEnvRunner
from rl_vlm.rollout.tasks import RolloutResult, RolloutTask
from rl_vlm.rollout.worker import RolloutWorker
from rl_vlm.serving.registry import fetch_model_files

T = TypeVar("T")


class VLMEnvRunner(RunEnvRunner):
    """Samples trajectory groups from the served policy; the algorithm's `run_config` says everything."""

    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        super().__init__((ObservationSpace(), TextSpace()), config=config, **kwargs)
        quiet_libraries()
        run: RunConfig = self.config.run_config
        num_workers = max(run.rollout.num_env_runners, 1)
        run_id, model = self.config.run_id, self.config.model
        assert model is not None  # `PolicyAlgorithmConfig.serve_from` has set it
        folder = model.on_this_node(partial(fetch_model_files, run_id), weights=False)
        self._worker = RolloutWorker(run, run_id, folder, self.place, num_workers, self.config.policy_key)
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        if self.concurrent_calls(run) > 1:
            self._thread = threading.Thread(target=self._loop.run_forever, name="rollouts", daemon=True)
            self._thread.start()

    @staticmethod
    def concurrent_calls(run: Any) -> int:
        """One at lag 0; otherwise one per group that is sampled at once, and one for an evaluation beside them."""
        return run.rollout.groups_at_once + 1 if run.rollout.max_policy_lag else 1

    def _wait_for(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._thread is None:
            return self._loop.run_until_complete(coroutine)
        # The driver has the deadline of a call: it restarts this process.
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def sample(self, *, tasks: list[RolloutTask], at_once: int | None = None) -> RolloutResult:
        """Sample all tasks, held-out ones `at_once` at a time. Failures are data in the result, never exceptions."""
        return self._wait_for(self._worker.run(tasks, at_once))

    def open_ahead(self, *, tasks: list[RolloutTask]) -> None:
        """Open the episodes that the next `sample` will be asked for."""
        self._wait_for(self._worker.open_ahead(tasks))

    def stop(self) -> None:
        """Close the environments."""
        self._worker.close_envs()
