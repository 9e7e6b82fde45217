"""ControlEnvRunner: an RLlib env runner that collects steps and plays evaluation episodes of control environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.env import INPUT_ENV_SPACES
from ray.rllib.env.env_runner import EnvRunner

from rl_vlm.config import RunConfig
from rl_vlm.control_envs.base import ControlEnv
from rl_vlm.control_envs.registry import make_control_env
from rl_vlm.preference.collector import Collector, EpisodeResult, Evaluator, NumpyActor
from rl_vlm.preference.replay import StepBatch
from rl_vlm.types import UserInputError


def make_run_env(run: RunConfig) -> ControlEnv:
    """One environment of a run, whose pictures have `preference.image_size`."""
    if "image_size" in run.env.kwargs:
        raise UserInputError("env.kwargs.image_size is not used: set preference.image_size.")
    return make_control_env(run.env.id, image_size=run.preference.image_size, **run.env.kwargs)


class ControlEnvRunner(EnvRunner):
    """Steps this runner's share of the run's environments; `run_config` says everything."""

    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        super().__init__(config=config, **kwargs)
        run: RunConfig = self.config.run_config
        collection = run.preference.collection
        place = max(int(kwargs.get("worker_index", 1)) - 1, 0)  # RLlib counts remote runners from 1
        self._spaces = (self.config.observation_space, self.config.action_space)
        self.collector = Collector(
            lambda: make_run_env(run),
            seed=run.seed,
            count=collection.envs_per_runner,
            first_env=place * collection.envs_per_runner,
            num_envs=max(collection.num_env_runners, 1) * collection.envs_per_runner,
            frames=run.preference.draws_frames,
        )
        self._evaluator = Evaluator(lambda: make_run_env(run), run.preference.evaluation.parallel)

    def make_env(self) -> None:
        """Environments are made when the first steps are asked for."""

    def sample(  # type: ignore[override]
        self, *, actor: NumpyActor | None, steps: int, episode_counts: Sequence[int], **_: Any
    ) -> StepBatch:
        """`steps` steps of every environment of this runner."""
        return self.collector.collect(actor, steps, episode_counts)

    def evaluate(self, actor: NumpyActor, seeds: Sequence[int], film: int) -> list[EpisodeResult]:
        """One episode per seed with the mode of the policy."""
        return self._evaluator.run(actor, seeds, film)

    def assert_healthy(self) -> None:
        """RLlib asks after construction."""
        assert self.collector is not None

    def get_spaces(self) -> dict[str, tuple[gymnasium.Space[Any], gymnasium.Space[Any]]]:
        """Observation and action space, under RLlib's keys."""
        return {INPUT_ENV_SPACES: self._spaces, DEFAULT_MODULE_ID: self._spaces}

    def get_metrics(self) -> dict[str, Any]:
        """Nothing: figures are computed where the steps arrive."""
        return {}

    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Nothing that RLlib should carry around; see `Collector.state`."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """See `get_state`."""

    def stop(self) -> None:
        """Close the environments."""
        self.collector.close()
        self._evaluator.close()
