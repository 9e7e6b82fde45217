"""RunAlgorithm: an RLlib Algorithm made from a run configuration: start, timing, metrics, clean-up."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import ray
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.util.placement_group import get_current_placement_group

from rl_vlm import tracing
from rl_vlm.algorithms.learners import Learners
from rl_vlm.config import CommonConfig, TrainConfig, apply_overrides
from rl_vlm.config.loading import validated
from rl_vlm.config.resources import claim
from rl_vlm.envs.loading import load_plugins
from rl_vlm.machine import available_memory
from rl_vlm.models.memory.placement import driver_gpu
from rl_vlm.models.reference import ModelReference
from rl_vlm.rollout.actors import ActorPool
from rl_vlm.rollout.base_env_runner import RunEnvRunner, RunnerConfig, ServedTeacher
from rl_vlm.serving.registry import OWN
from rl_vlm.tracing import Span

if TYPE_CHECKING:
    from rl_vlm.serving.service import PolicyService


class RunAlgorithmConfig(AlgorithmConfig):
    """An RLlib configuration that follows from `run_config` (`_apply_run_config`)."""

    run_config: Any  # the kind's own class
    runner_class: type[RunEnvRunner]
    run_id, policy_key = "", OWN  # of the served policy, if there is one
    served_model: ModelReference | None = None  # RLlib has a field `model`
    teacher: ServedTeacher | None = None

    def __init__(self, algo_class: type[Algorithm] | None = None, run_config: TrainConfig | None = None) -> None:
        super().__init__(algo_class=algo_class)  # without arguments: RLlib fills it from the state of another
        self.run_config = run_config
        self.scratch_folder: Path | None = None
        self.service: PolicyService | None = None  # started before the algorithm
        if run_config is not None:
            self._apply_run_config()

    def update_from_dict(self, config_dict: dict[str, Any]) -> Self:
        """Takes RLlib's keys, `run_config` (nested) and its dotted keys (`learner.lr`), as Tune sends them. `seed` is
        the run's."""
        rest = dict(config_dict)
        run_config = rest.pop("run_config", None)
        dotted = {key: rest.pop(key) for key in list(rest) if "." in key or (key == "seed" and rest[key] is not None)}
        if run_config is not None or dotted:
            base = run_config if run_config is not None else self.run_config
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
            num_gpus_per_learner=self.run_config.gpu_shares[1],
            local_gpu_idx=driver_gpu(self.run_config),  # RLlib would take the first, which is a replica's
            custom_resources_per_learner=claim(resources.learners_on),
        )
        self.env_runners(custom_resources_per_env_runner=claim(resources.env_runners_on))
        self.debugging(seed=self.run_config.seed)

    def build_learner_connector(self, *args: Any, **kwargs: Any) -> None:
        """No connectors: the driver makes batches, and env runners encode observations and decode actions."""

    build_env_to_module_connector = build_module_to_env_connector = build_learner_connector

    @property
    def is_online(self) -> bool:
        """RLlib starts no env runners: unpickling its configuration would import RLlib, torch and Tune in each."""
        return False


class RunAlgorithm(Algorithm):
    """The RLlib side of both loops, so that Tune can run them as they are."""

    run_config: TrainConfig
    _service: PolicyService | None = None
    learner_group: Any
    runners: ActorPool
    local_runner: Any = None  # an env runner in this process, where there are no others

    @classmethod
    @abstractmethod
    def get_default_config(cls) -> RunAlgorithmConfig:
        """RLlib's hook: the default configuration."""

    @classmethod
    def from_run_config(
        cls, run_config: TrainConfig, scratch_folder: Path | None = None, service: PolicyService | None = None
    ) -> Any:
        """The RLlib configuration of a run; its files go to `scratch_folder`. `service`: one that has been started."""
        config = cls.get_default_config()
        config.run_config = run_config
        config.scratch_folder, config.service = scratch_folder, service
        config._apply_run_config()
        return config

    def __repr__(self) -> str:
        """RLlib's reads the configuration; where that was rejected Ray, which prints this, would lose the error."""
        return type(self).__name__

    def _setup_logdir(self) -> None:
        """RLlib leaves an empty folder in ~/ray_results for each run, and fails where the home is read-only."""
        if self._storage or self.config.scratch_folder is None:
            super()._setup_logdir()
        else:
            self._logdir = str(self.config.scratch_folder)

    def setup(self, config: AlgorithmConfig) -> None:
        if not isinstance(config, AlgorithmConfig):  # Tune's dictionary
            config = self.get_default_config().update_from_dict(config)
        config = config.copy(copy_frozen=False)
        self.run_config = config.run_config
        self.folder: Path = config.scratch_folder or Path(self.logdir)
        self.restarts: Counter[str] = Counter()
        self.last_metrics: dict[str, float] = {}
        self.last_spans: list[Span] = []  # that came in the last iteration
        self.stop_requested: Callable[[], bool] = lambda: False
        self._clock: defaultdict[str, float] = defaultdict(float)
        try:
            load_plugins(self.run_config.plugins)
            # The served model loads while env runners and learners start.
            self.start_services(config)
            config.freeze()
            self.config = config
            self._start_runners()
            super().setup(config)
            self.learners = Learners(self.learner_group, self.run_config.learner, self._rebuild_learners, self.restarts)
            # An error in the constructor of an env runner ends the start, with its reason.
            self.runners.begin(lambda _, runner: runner.ping.remote()).results(
                self.run_config.serving.startup_timeout_s
            )
            self.make_state()
        except BaseException:
            # On a cluster that was joined, services would outlive a failed start.
            self.stop_services()
            raise

    @abstractmethod
    def start_services(self, config: Any) -> None:
        """Start what runs beside RLlib's actors, and add to the configuration what is known only then."""

    def stop_services(self) -> None:
        """Stop what `start_services` started, also if it failed halfway. A second call does nothing."""
        service, self._service = self._service, None
        if service is not None:
            service.stop()

    @abstractmethod
    def make_state(self) -> None:
        """Make the algorithm's own state; env runners and learners have started."""

    @abstractmethod
    def iterate(self) -> None:
        """One iteration. Raises LearnerLostError, after which `recover` is due."""

    @abstractmethod
    def iteration_metrics(self, seconds: float) -> dict[str, float]:
        """The metrics of the last iteration, which took so long."""

    @abstractmethod
    def restore_learners(self) -> None:
        """Restore the newest available state in new learners."""

    @abstractmethod
    def progress(self) -> tuple[int, int, int]:
        """Done, in all, and between evaluations: iterations, or steps of a preference run."""

    @abstractmethod
    def held_out(self) -> dict[str, float]:
        """`accuracy` (success of a preference run) and `reward` of an evaluation now."""

    def training_step(self) -> None:
        started = time.perf_counter()
        self._clock.clear()
        with self._traced() as self.last_spans:
            self.iterate()
        seconds = time.perf_counter() - started
        total, free = available_memory()
        self.last_metrics = {
            **self.iteration_metrics(seconds),
            "time/step": seconds,
            **{f"time/{name}": seconds for name, seconds in self._clock.items()},
            "memory/node": (total - free) / 2**30,
            "restarts/learner": 0.0,  # from the start: an alert looks at its growth
            **{f"restarts/{part}": float(count) for part, count in self.restarts.items()},
        }
        for name, value in self.last_metrics.items():
            self.metrics.log_value(tuple(name.split("/")), value, window=1)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds of this context to the metric `time/<name>`; where the iteration is traced, it is a span."""
        started = time.perf_counter()
        try:
            with tracing.span(name):
                yield
        finally:
            self._clock[name] += time.perf_counter() - started

    def _traced(self) -> AbstractContextManager[list[Span]]:
        """Inside, what happens is traced, in every `logging.traces`-th iteration of this process."""
        every, done = self.run_config.logging.traces, self.progress()[0]
        if not every or (self.iteration + 1) % every:
            return nullcontext([])
        return tracing.trace(
            "driver", "iteration", run=self.run_config.name, algorithm=self.run_config.algorithm.name, done=done
        )

    def _start_runners(self) -> None:
        """Start the env runners, which get ready while the learners start; Ray restarts a runner that dies."""
        config, kind = self.config, self.config.runner_class
        settings = RunnerConfig(self.run_config, config.run_id, config.served_model, config.policy_key, config.teacher)
        self.runners = ActorPool({})
        if not config.num_env_runners:
            self.local_runner = kind(config=settings, worker_index=0)
            return
        actor = ray.remote(
            num_cpus=config.num_cpus_per_env_runner,
            resources=config.custom_resources_per_env_runner,
            max_restarts=-1,
            max_concurrency=kind.concurrent_calls(self.run_config),
        )(kind)
        in_trial = get_current_placement_group() is not None  # whose first bundle is the trial's own
        self.runners = ActorPool(
            {
                number: actor.options(placement_group_bundle_index=number if in_trial else -1).remote(
                    config=settings, worker_index=number
                )
                for number in range(1, config.num_env_runners + 1)
            }
        )

    def _rebuild_learners(self) -> Any:
        spaces = {DEFAULT_MODULE_ID: (self.config.observation_space, self.config.action_space)}
        self.learner_group = self.config.build_learner_group(
            rl_module_spec=self.config.get_multi_rl_module_spec(spaces=spaces, inference_only=False)
        )
        return self.learner_group

    def recover(self, error: Exception) -> None:
        """After LearnerLostError: new learners with the newest state that is known. Raises LearnerDiedError."""
        self.learners.replace(error, self.restore_learners)

    def restore_env_runners(self, env_runner_group: Any) -> list[int]:
        """RLlib calls this before each step. The samplers replace runners, which have no state."""
        return []

    def cleanup(self) -> None:
        try:
            super().cleanup()
        finally:
            try:
                self.runners.stop()
                if self.local_runner is not None:
                    self.local_runner.stop()
            finally:
                self.stop_services()
