"""PolicyAlgorithm: the base class of algorithms that train the served policy: rollouts, publication, evaluation, checkpoints."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from rl_vlm import tracing
from rl_vlm.algorithms.base import RunAlgorithm
from rl_vlm.algorithms.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from rl_vlm.algorithms.config import RunAlgorithmConfig
from rl_vlm.algorithms.learners import on_all_learners, on_every_learner
from rl_vlm.algorithms.sight import SightProbe
from rl_vlm.config import AlgorithmSection, PolicyConfig
from rl_vlm.envs.base import ObservationSpace, TextSpace
from rl_vlm.envs.parts import survey
from rl_vlm.evaluation.heldout import evaluation_tasks, viewed_tasks
from rl_vlm.evaluation.outcomes import outcomes_of_groups
from rl_vlm.evaluation.sight_faults import Fault
from rl_vlm.evaluation.summary import summarize
from rl_vlm.learning.learner import UpdateBatch, UpdateResult, VLMLearner
from rl_vlm.learning.plan import Shards
from rl_vlm.learning.returns import Rescaling
from rl_vlm.learning.scores import Targets
from rl_vlm.learning.stats import UpdateStats
from rl_vlm.learning.update import linear_schedule
from rl_vlm.models.loading import TextSide, load_text_side
from rl_vlm.models.memory.cards import shares_gpu
from rl_vlm.models.payload import WeightPayload
from rl_vlm.models.reference import ModelReference
from rl_vlm.plugins import load_plugins
from rl_vlm.rollout.curriculum import make_task_source
from rl_vlm.rollout.env_metrics import group_figures
from rl_vlm.rollout.env_runner import VLMEnvRunner
from rl_vlm.rollout.figures import sampling_figures
from rl_vlm.rollout.rollouts import make_rollouts
from rl_vlm.rollout.runners import EnvRunners
from rl_vlm.rollout.task_stream import TaskStream
from rl_vlm.seeding import derive_seed
from rl_vlm.serving.policy_key import OWN
from rl_vlm.serving.service import PolicyService, start_service
from rl_vlm.types import RLVLMError, TrajectoryGroup


class PolicyAlgorithmConfig(RunAlgorithmConfig):
    """RLlib's configuration of an algorithm that trains the served policy."""

    run_config: PolicyConfig

    def __init__(self, algo_class: type[Algorithm], algorithm: AlgorithmSection) -> None:
        self.run_id = ""
        self.policy_key = OWN
        self.served_model: ModelReference | None = None  # RLlib has a field `model`
        super().__init__(algo_class, PolicyConfig(algorithm=algorithm))

    def _apply_run_config(self) -> None:
        super()._apply_run_config()
        run = self.run_config
        self.environment(env=None, observation_space=ObservationSpace(), action_space=TextSpace())
        self.env_runners(
            env_runner_cls=VLMEnvRunner,
            num_env_runners=run.rollout.num_env_runners,
            num_cpus_per_env_runner=run.rollout.cpus_per_env_runner,
            create_local_env_runner=False,
        )
        self.learners(learner_class=VLMLearner)
        self.training(lr=run.learner.lr)

    def prepare(self, service: PolicyService) -> None:
        """Set the served policy's run id, key and model, which are known once it is started."""
        self.run_id, self.policy_key, self.served_model = service.run_id, service.key, service.model
        self._apply_run_config()

    def get_default_rl_module_spec(self) -> RLModuleSpec:
        """RLlib asks for the module that the learners train."""
        from rl_vlm.learning.module import VLMModule  # env runners must not import it

        return RLModuleSpec(
            module_class=VLMModule,
            model_config={"model": self.served_model, "run_id": self.run_id, "run_config": self.run_config},
        )


class PolicyAlgorithm(RunAlgorithm):
    """The policy loop. A subclass says what is learned from the groups of an iteration (`learn_from`)."""

    run: PolicyConfig
    _earlier_restarts = 0  # of env runners, in processes before this one

    def start_services(self, config: PolicyAlgorithmConfig) -> None:
        """Start the served policy."""
        load_plugins(self.run.plugins)
        self._service: PolicyService | None = config.service or start_service(self.run)
        config.prepare(self._service)
        if shares_gpu(self.run):
            # vLLM refuses a GPU on which less is free than it was promised.
            self._service.wait_until_ready()

    def stop_services(self) -> None:
        """Stop the served policy. A second call does nothing."""
        service = getattr(self, "_service", None)
        self._service = None
        if service is not None:
            service.stop()

    @property
    def service(self) -> PolicyService:
        """The served policy."""
        assert self._service is not None
        return self._service

    def prepare(self) -> None:
        """Make the task stream, the rollouts and the counters."""
        run = self.run
        found = survey(run.env, "train", run.evaluation.split)
        self.test_sizes, self._env_metrics = found.sizes[run.evaluation.split], found.metrics
        stream = TaskStream(make_task_source(run, found.sizes["train"]), run)
        self.rollouts = make_rollouts(EnvRunners(self.env_runner_group), stream, run)
        self.rollouts.stop_requested = lambda: self.stop_requested()  # which is set later
        self.rng = np.random.default_rng(derive_seed(run.seed, 1))
        self.version = 0
        self.last_groups: list[TrajectoryGroup] = []
        self.last_advantages: list[np.ndarray] = []
        self._text: TextSide | None = None
        self._publication: dict[str, float] = {}  # figures of the last publication that was acknowledged
        self._last_checkpoint: Path | None = None
        self.reset()
        self._beginning = self.state()
        self.service.wait_until_ready()
        if run.model.adapter is not None:
            # All tasks ask for at least this version, so no replica answers as the base model.
            self._publish(self.on_learner(lambda learner: learner.adapter(1)))
        self._first_version = self.version
        self.sight = SightProbe(self)
        self.sight_faults: list[Fault] = []  # of the last iteration

    @abstractmethod
    def learn_from(self, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
        """Learn from the groups of an iteration, publish, and return the figures."""

    def reset(self) -> None:
        """Set the state that `state` returns to that of the beginning."""
        self.updates = 0  # iterations that are in the weights

    def state(self) -> dict[str, Any]:
        """The driver's part of a checkpoint, as JSON."""
        return {"updates": self.updates, "rollouts": self.rollouts.state(), "rng": self.rng.bit_generator.state}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from `state`; the rollouts are restored apart from it."""
        self.updates = int(state["updates"])
        self.rng.bit_generator.state = state["rng"]

    def iterate(self) -> dict[str, float]:
        """Sample, learn, publish."""
        started = time.perf_counter()
        self.remember_groups([], [])  # where all groups are lost, the last iteration's must not be kept as this one's
        with self.timed("sample"):
            groups = self.rollouts.next_groups(self.version, self.iterations_left)
        rollout = self.run.rollout
        figures = sampling_figures(
            groups, self.version, self._clock["sample"], rollout.max_turns, rollout.crosses_versions
        )
        figures |= group_figures(self._env_metrics, groups)
        if groups:
            with self.timed("sight"):
                seen, self.sight_faults = self.sight.measure(groups)
            with self._replicas_at_rest():
                figures |= {**self.learn_from(groups), **seen}
            if rollout.max_policy_lag:  # sampled all the time, so that waiting is not what it took
                figures["rollout/tokens_per_s"] = figures["rollout/tokens"] / (time.perf_counter() - started)
        return {**figures, **self.counts()}

    @contextmanager
    def _replicas_at_rest(self) -> Iterator[None]:
        """Inside, the learner has the replicas' memory of keys and values, where `serving.vllm.rest_while_learning` says so."""
        if not self.run.serving.vllm.rest_while_learning:
            yield
            return
        version = self.version
        with self.timed("rest"):
            self.service.sleep()
        try:
            yield
        finally:
            if self.version == version:  # no new version has woken them
                self.service.wake()

    def training_step(self) -> None:
        """RLlib's hook for one iteration."""
        super().training_step()
        self.last_spans += self.rollouts.take_spans()
        self.updates += 1

    @property
    def iterations_left(self) -> int:
        """Iterations after the running one."""
        return max(self.run.algorithm.iterations - self.updates - 1, 0)

    def on_learner(self, function: Callable[[Any], Any]) -> Any:
        """See RunAlgorithm; all learners are called where they compute in step."""
        if self.run.learner.in_step:
            return on_all_learners(self.learner_group, function)
        return super().on_learner(function)

    # Parts of an iteration.

    def learn(
        self,
        shards: Shards,
        *,
        targets: Sequence[Targets] = (),
        rescaling: Rescaling | None = None,
        learn_policy: bool = True,
    ) -> UpdateStats | None:
        """Update the learners and publish the new adapter; None when learners died and were replaced.

        With `targets`, one per learner, they learn from the minibatches that they have scored.
        """
        learner, algorithm = self.run.learner, self.run.algorithm
        factor = 1.0
        if learner.lr_schedule == "linear":
            factor = linear_schedule(self.updates, algorithm.iterations - 1, learner.lr_final_fraction)
        results: list[UpdateResult] | None = self.update_learners(
            [
                UpdateBatch(
                    minibatches,
                    shards.active,
                    algorithm.epochs,
                    factor,
                    self.version + 1,
                    targets[place] if targets else None,
                    rescaling,
                    learn_policy,
                    tracing.traceparent(),
                )
                for place, minibatches in enumerate(shards.minibatches)
            ]
        )
        if results is None:
            return None
        for result in results:
            tracing.adopt(result.spans)
        adapter = next(result.adapter for result in results if result.adapter is not None)
        with self.timed("publish"):
            self._publish(adapter)
        stats = UpdateStats.merge([result.stats for result in results])
        stats.lr = learner.lr * factor
        return stats

    def _publish(self, adapter: WeightPayload) -> None:
        if self.run.model.train == "full" and self.run.published_dtype != "float32":
            adapter = adapter.rounded(self.run.published_dtype)  # masters, of a checkpoint: twice the bytes
        previous = self.service.publish(adapter)
        if previous is not None:
            self._publication = {"weights/publish_s": previous.seconds, "weights/acked": float(len(previous.acked))}
        self.version = adapter.version

    def counts(self) -> dict[str, float]:
        """Figures of the whole run so far, and of the last publication."""
        self._count_env_runners()
        return {
            "weights/version": float(self.version),
            **self._publication,
            **{f"time/{name}": seconds for name, seconds in self.rollouts.timings.items()},
            **self.rollouts.figures,
            **self.rollouts.task_figures,
            **{f"dropped/{reason}": float(count) for reason, count in self.rollouts.dropped.items()},
        }

    def _count_env_runners(self) -> None:
        self.restarts["env_runner"] = self._earlier_restarts + self.rollouts.restarts

    def decode(self, token_ids: np.ndarray) -> str:
        """Token ids as text, special tokens included."""
        if self._text is None:
            self._text = load_text_side(self.service.model.folder)
        return self._text.codec.decode(token_ids)

    def evaluate_policy(self) -> dict[str, Any]:
        """Greedy (and, with `evaluation.samples` above 1, pass@k) accuracy on the held-out split, per variant and environment."""
        started = time.perf_counter()
        with self._evaluated_weights():
            tasks = evaluation_tasks(self.run, self.test_sizes, self.version)
            if self.sight.needed and self.run.sight.blank_items:
                tasks += viewed_tasks(tasks, "blank", self.run.sight.blank_items)
            groups, result = self.rollouts.evaluate(tasks, self.run.evaluation.timeout_s)
        self._count_env_runners()
        return {
            **summarize(self.run, tasks, outcomes_of_groups(self.run, tasks, groups), self._env_metrics),
            "lost": len(result.lost),
            "policy_version": self.version,
            "seconds": time.perf_counter() - started,
        }

    def progress(self) -> tuple[int, int, int]:
        """Iterations done and in all, and between evaluations."""
        return self.updates, self.run.algorithm.iterations, self.run.evaluation.every

    def held_out(self) -> dict[str, float]:
        """Greedy accuracy and mean reward of the first variant."""
        results, variant = self.evaluate_policy(), next(iter(self.run.evaluation.variants))
        return {name: float(results[f"{name}/{variant}"]) for name in ("accuracy", "reward")}

    @contextmanager
    def _evaluated_weights(self) -> Iterator[None]:
        """Inside, the replicas hold what `evaluation.weights` names; each exchange takes a version."""
        if self.run.evaluation.weights == "policy":
            yield
            return
        version = self.version

        def back(raised: type[BaseException] | None, *_: object) -> None:
            """As an exit callback; of an error in the evaluation and one here the first counts. An interruption waits for nothing."""
            if raised is not None and not issubclass(raised, Exception):
                return
            with suppress(RLVLMError) if raised else nullcontext():  # such as a learner that is lost
                self._publish_restored(self.on_learner(lambda learner: learner.adapter(version)))

        self._publish_restored(self.averaged_adapter())
        with ExitStack() as stack:
            stack.push(back)
            yield

    def averaged_adapter(self) -> WeightPayload:
        """The average of the weights. Raises LearnerLostError."""
        version = self.version
        return self.on_learner(lambda learner: learner.averaged_adapter(version))  # type: ignore[no-any-return]

    # Checkpoints.

    def checkpoint(self) -> Checkpoint:
        """Everything that an exact resume needs."""
        version = self.version

        def learner_state(
            learner: VLMLearner,
        ) -> tuple[WeightPayload, dict[str, torch.Tensor], dict[str, torch.Tensor], list[int]]:
            return learner.adapter(version), learner.moments(), learner.extras(), torch.get_rng_state().tolist()

        adapter, moments, extras, torch_rng = self.on_learner(learner_state)
        state = {**self.state(), "torch_rng": torch_rng, "restarts": dict(self.restarts)}
        return Checkpoint(adapter, moments, state, extras)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Tune's hook; the folder holds safetensors and JSON, no pickle."""
        write_checkpoint(Path(checkpoint_dir), self.checkpoint())

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Tune's hook, and `--resume`."""
        self._restore(read_checkpoint(Path(checkpoint_dir)), new_process=True)
        self._last_checkpoint = Path(checkpoint_dir)

    def remember_checkpoint(self, folder: Path) -> None:
        """Use this checkpoint when learners must be replaced."""
        self._last_checkpoint = folder

    def restore_learners(self) -> None:
        """Go back to the last checkpoint, or to the beginning; the iterations since then are done again."""
        lost = self.updates
        if self._last_checkpoint is not None:
            self._restore(read_checkpoint(self._last_checkpoint), new_process=False)
        else:
            self.set_state(self._beginning)
            self.rollouts.restore(self._beginning["rollouts"], counts=False)
            version = self.version
            self._publish_restored(self.on_learner(lambda learner: learner.adapter(version)))
        self.rollouts.dropped["iterations_repeated"] += lost - self.updates
        self.updates -= 1  # `training_step` counts this iteration, in which nothing was learned

    def replace_lost_learners(self, error: Exception) -> None:
        """Between two iterations: new learners in place of those of which one is lost. Raises LearnerDiedError."""
        self._replace_learners(error)
        self.updates += 1  # no iteration is under way that would count

    def _restore(self, checkpoint: Checkpoint, *, new_process: bool) -> None:
        """Go on from a checkpoint; a new process also continues with its counts."""
        moments, state, extras = checkpoint.moments, checkpoint.state, checkpoint.extras
        arrays = {name: tensor.numpy() for name, tensor in checkpoint.adapter.state().items()}
        torch_rng = state["torch_rng"]

        def load(learner: VLMLearner) -> bool:
            learner.restore(arrays, moments, extras)
            torch.set_rng_state(torch.tensor(torch_rng, dtype=torch.uint8))
            return True

        on_every_learner(self.learner_group, load)
        self.set_state(state)
        fresh = new_process and max(self.version, self.service.newest_version()) <= self._first_version
        self.rollouts.restore(state["rollouts"], counts=fresh)
        if fresh:
            self.restarts = Counter(state["restarts"])
            self._earlier_restarts = self.restarts["env_runner"]
            self._publish(checkpoint.adapter)
        else:
            self._publish_restored(checkpoint.adapter)

    def _publish_restored(self, adapter: WeightPayload) -> None:
        """Publish old weights under a new version: versions only grow, and one version never has two contents."""
        self._publish(replace(adapter, version=max(self.service.newest_version(), self.version) + 1))

    def remember_groups(self, groups: Sequence[TrajectoryGroup], advantages: list[np.ndarray]) -> None:
        """Keep the groups of this iteration and their mean advantages float64 [G], for the dump of trajectories."""
        self.last_groups, self.last_advantages = list(groups), advantages
