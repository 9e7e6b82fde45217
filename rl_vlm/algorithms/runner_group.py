"""An env-runner group whose processes get a small configuration instead of RLlib's, so that they need not import RLlib."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.rllib.algorithms import algorithm
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.util.placement_group import get_current_placement_group

from rl_vlm.imports import replaced
from rl_vlm.rollout.base_env_runner import RunEnvRunner, RunnerConfig
from rl_vlm.serving.policy_key import OWN

# RLlib accepts them as env runners without the base class, whose import would cost each of their processes seconds.
EnvRunner.register(RunEnvRunner)


class RunnerGroup(EnvRunnerGroup):
    """Starts `RunEnvRunner`s: unpickling an AlgorithmConfig would import RLlib, torch and Tune in each of them."""

    def _make_worker(self, *, worker_index: int, **_: Any) -> Any:
        given = self._remote_config
        settings = RunnerConfig(
            run_config=given.run_config,
            run_id=getattr(given, "run_id", ""),
            model=getattr(given, "served_model", None),
            observation_space=given.observation_space,
            action_space=given.action_space,
            policy_key=getattr(given, "policy_key", OWN),
        )
        if worker_index == 0:  # in this process
            return self.env_runner_cls(config=settings, worker_index=0)
        bundle = -1 if get_current_placement_group() is None else self._pg_offset + worker_index
        runner = ray.remote(**self._remote_args)(self.env_runner_cls).options(
            placement_group_bundle_index=bundle,
            max_concurrency=self.env_runner_cls.concurrent_calls(given.run_config),
        )
        return runner.remote(config=settings, worker_index=worker_index)

    def sync_env_runner_states(self, **_: Any) -> None:
        """Does nothing: weights are in Serve or sent with each call, and env runners keep no other state of RLlib's."""


@contextmanager
def light_env_runners() -> Iterator[None]:
    """Inside this context `Algorithm.setup` makes a `RunnerGroup`: RLlib has no setting for the group's class."""
    with replaced(algorithm, "EnvRunnerGroup", RunnerGroup):
        yield
