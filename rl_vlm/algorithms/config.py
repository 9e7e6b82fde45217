"""The base of the algorithms' RLlib configurations, which are derived from a run configuration."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rl_vlm.config import CommonConfig, TrainConfig, apply_overrides
from rl_vlm.config.loading import validated
from rl_vlm.config.resources import claim
from rl_vlm.models.memory.cards import driver_gpu

if TYPE_CHECKING:
    from rl_vlm.serving.service import PolicyService


class RunAlgorithmConfig(AlgorithmConfig):
    """An RLlib configuration whose `run_config` holds everything; `_apply_run_config` sets RLlib's own fields from it."""

    run_config: Any  # the kind's own class

    def __init__(self, algo_class: type[Algorithm], run_config: TrainConfig) -> None:
        super().__init__(algo_class=algo_class)
        self.run_config = run_config
        self.scratch_folder: Path | None = None
        self.service: PolicyService | None = None  # started before the algorithm
        self._apply_run_config()

    @classmethod
    def from_run_config(
        cls, run: TrainConfig, scratch_folder: Path | None = None, service: PolicyService | None = None
    ) -> Self:
        """The RLlib configuration of a run. `scratch_folder` keeps what the run needs on disk; `service` is the run's, if it has been
        started already."""
        config = cls()  # type: ignore[call-arg]  # the algorithms' configurations know their class
        config.run_config = run
        config.scratch_folder, config.service = scratch_folder, service
        config._apply_run_config()
        return config

    def own_copy(self, given: AlgorithmConfig | dict[str, Any]) -> Self:
        """A copy that is not frozen, of RLlib's frozen configuration or of Tune's dictionary."""
        config = given if isinstance(given, AlgorithmConfig) else self.update_from_dict(given)
        assert isinstance(config, type(self))
        return config.copy(copy_frozen=False)

    def update_from_dict(self, config_dict: dict[str, Any]) -> Self:
        """RLlib's keys, `run_config` (nested), and the run configuration's dotted keys (`learner.lr`), as Tune sends them.

        `seed` is the run's, from which RLlib's follows.
        """
        rest = dict(config_dict)
        run = rest.pop("run_config", None)
        dotted = {key: rest.pop(key) for key in list(rest) if "." in key or (key == "seed" and rest[key] is not None)}
        if run is not None or dotted:
            base = run if run is not None else self.run_config
            data = base.model_dump() if isinstance(base, CommonConfig) else dict(base)
            self.run_config = validated(type(self.run_config), apply_overrides(data, dotted))
            self._apply_run_config()
        super().update_from_dict(rest)
        return self

    def _apply_run_config(self) -> None:
        learner, resources = self.run_config.learner, self.run_config.resources
        self.framework("torch")
        self.learners(
            num_learners=learner.num_learners,
            num_cpus_per_learner=learner.cpus_per_learner,
            num_gpus_per_learner=learner.gpus_per_learner,
            local_gpu_idx=driver_gpu(self.run_config),  # RLlib would take the first, which is a replica's
            custom_resources_per_learner=claim(resources.learners_on),
        )
        self.env_runners(custom_resources_per_env_runner=claim(resources.env_runners_on))
        self.fault_tolerance(
            restart_failed_env_runners=True,
            delay_between_env_runner_restarts_s=0.0,
            env_runner_health_probe_timeout_s=5.0,
        )
        self.debugging(seed=self.run_config.seed)

    def build_learner_connector(self, *args: Any, **kwargs: Any) -> None:
        """No connector: batches are made by the driver."""

    def build_env_to_module_connector(self, *args: Any, **kwargs: Any) -> None:
        """No connector: env runners encode observations themselves."""

    def build_module_to_env_connector(self, *args: Any, **kwargs: Any) -> None:
        """No connector: env runners decode actions themselves."""
