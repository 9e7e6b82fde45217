"""ControlEnvRunner: an env runner that collects steps and plays evaluation episodes of control environments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_vlm.config import PreferenceConfig
from rl_vlm.preference.collector import Collector, EpisodeResult, Evaluator, NumpyActor, make_run_env
from rl_vlm.preference.replay import StepBatch
from rl_vlm.rollout.base_env_runner import RunEnvRunner


class ControlEnvRunner(RunEnvRunner):
    """Steps this runner's share of the run's environments; all settings are in `run_config`."""

    def __init__(self, *, config: Any, **kwargs: Any) -> None:
        super().__init__((config.observation_space, config.action_space), config=config, **kwargs)
        run_config: PreferenceConfig = self.config.run_config
        collection = run_config.preference.collection
        self.collector = Collector(
            lambda: make_run_env(run_config),
            seed=run_config.seed,
            count=collection.envs_per_runner,
            first_env=self.place * collection.envs_per_runner,
            num_envs=collection.num_envs,
            frames=run_config.preference.draws_frames,
        )
        evaluation = run_config.preference.evaluation
        self._evaluator = Evaluator(lambda: make_run_env(run_config), evaluation.parallel, evaluation.end_on_success)

    def sample(self, *, actor: NumpyActor | None, steps: int, episode_counts: Sequence[int]) -> StepBatch:
        """`steps` steps of every environment of this runner."""
        return self.collector.collect(actor, steps, episode_counts)

    def evaluate(self, actor: NumpyActor, seeds: Sequence[int], film: int) -> list[EpisodeResult]:
        """One episode per seed with the mode of the policy."""
        return self._evaluator.run(actor, seeds, film)

    def stop(self) -> None:
        """Close the environments."""
        self.collector.close()
        self._evaluator.close()
