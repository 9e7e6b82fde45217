"""PolicyAlgorithm: the base class of algorithms that train the served policy: rollouts, publication, evaluation, checkpoints."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from rl_vlm.algorithms.base import RunAlgorithm
from rl_vlm.algorithms.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from rl_vlm.algorithms.config import RunAlgorithmConfig
from rl_vlm.algorithms.learners import on_every_learner
from rl_vlm.envs.base import ObservationSpace, TextSpace
from rl_vlm.envs.registry import make
from rl_vlm.evaluation.heldout import evaluation_tasks, summarize
from rl_vlm.learning.learner import UpdateBatch, UpdateResult, VLMLearner
from rl_vlm.learning.plan import UpdatePlan
from rl_vlm.learning.update import UpdateStats, linear_schedule
from rl_vlm.models.adapter import AdapterPayload
from rl_vlm.models.loading import TextSide, load_text_side
from rl_vlm.plugins import load_plugins
from rl_vlm.rollout.cursor import DataCursor
from rl_vlm.rollout.env_runner import VLMEnvRunner
from rl_vlm.rollout.rollouts import make_rollouts
from rl_vlm.rollout.runners import EnvRunners
from rl_vlm.rollout.task_stream import TaskStream
from rl_vlm.seeding import derive_seed
from rl_vlm.serving.publisher import PolicyService, start_service
from rl_vlm.types import TrajectoryGroup


class PolicyAlgorithmConfig(RunAlgorithmConfig):
    """RLlib's configuration of an algorithm that trains the served policy."""

    def __init__(self, algo_class: type[Algorithm]) -> None:
        self.run_id = ""
        self.model_folder: Path | None = None
        super().__init__(algo_class)

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
        """Set the served policy's run id and model folder, which are known once it is started."""
        self.run_id, self.model_folder = service.run_id, service.model
        self._apply_run_config()

    def get_default_rl_module_spec(self) -> RLModuleSpec:
        """RLlib asks for the module that the learners train."""
        from rl_vlm.learning.module import VLMModule  # env runners must not import it

        return RLModuleSpec(
            module_class=VLMModule, model_config={"folder": self.model_folder, "run_config": self.run_config}
        )


class PolicyAlgorithm(RunAlgorithm):
    """The policy loop. A subclass says what one iteration learns (`iterate`)."""

    def start_services(self, config: PolicyAlgorithmConfig) -> None:
        """Start the served policy."""
        load_plugins(self.run.plugins)
        self._service: PolicyService | None = start_service(self.run, self.folder / "serving")
        config.prepare(self._service)

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
        env = make(run.env.id, **run.env.make_kwargs())
        num_train = run.env.num_items or env.num_items("train")
        self._num_test = env.num_items(run.evaluation.split)
        env.close()
        stream = TaskStream(DataCursor(num_train, run.seed), run)
        self.rollouts = make_rollouts(EnvRunners(self.env_runner_group), stream, run)
        self.rollouts.stop_requested = lambda: self.stop_requested()
        self.rng = np.random.default_rng(derive_seed(run.seed, 1))
        self.updates = 0  # iterations that are in the weights
        self.version = 0
        self.last_groups: list[TrajectoryGroup] = []
        self.last_advantages: list[np.ndarray] = []
        self._text: TextSide | None = None
        self._publication: dict[str, float] = {}  # figures of the last publication that was acknowledged
        self._last_checkpoint: Path | None = None
        self._beginning = (self.rollouts.state(), self.rng.bit_generator.state)
        self.service.wait_until_ready()

    def training_step(self) -> None:
        """RLlib's hook for one iteration."""
        super().training_step()
        self.updates += 1

    @property
    def iterations_left(self) -> int:
        """Iterations after the running one."""
        return max(self.run.algorithm.iterations - self.updates - 1, 0)

    # Parts of an iteration.

    def learn(self, plan: UpdatePlan) -> UpdateStats | None:
        """Update the learners and publish the new adapter; None when learners died and were replaced."""
        learner, algorithm = self.run.learner, self.run.algorithm
        lr = learner.lr
        if learner.lr_schedule == "linear":
            lr *= linear_schedule(self.updates, algorithm.iterations - 1, learner.lr_final_fraction)
        results: list[UpdateResult] | None = self.update_learners(
            [UpdateBatch(shard, plan.active, algorithm.epochs, lr, self.version + 1) for shard in plan.shards]
        )
        if results is None:
            return None
        adapter = next(result.adapter for result in results if result.adapter is not None)
        with self.timed("publish"):
            self._publish(adapter)
        stats = UpdateStats.merge([result.stats for result in results])
        stats.lr = lr
        return stats

    def _publish(self, adapter: AdapterPayload) -> None:
        previous = self.service.publish(adapter)
        if previous is not None:
            self._publication = {"weights/publish_s": previous.seconds, "weights/acked": float(len(previous.acked))}
        self.version = adapter.version

    def counts(self) -> dict[str, float]:
        """Figures of the whole run so far, and of the last publication."""
        self.restarts["env_runner"] = self.rollouts.restarts
        return {
            "weights/version": float(self.version),
            **self._publication,
            **{f"time/{name}": seconds for name, seconds in self.rollouts.timings.items()},
            **self.rollouts.figures,
            **{f"dropped/{reason}": float(count) for reason, count in self.rollouts.dropped.items()},
        }

    def decode(self, token_ids: np.ndarray) -> str:
        """Token ids as text, special tokens included."""
        if self._text is None:
            self._text = load_text_side(self.config.model_folder)
        return self._text.codec.decode(token_ids)

    def evaluate_policy(self) -> dict[str, Any]:
        """Greedy (and, with `evaluation.samples` above 1, pass@k) accuracy on the held-out split, per variant."""
        tasks = evaluation_tasks(self.run, self._num_test, self.version)
        started = time.perf_counter()
        groups, result = self.rollouts.evaluate(tasks, self.run.evaluation.timeout_s)
        self.restarts["env_runner"] = self.rollouts.restarts
        return {
            **summarize(self.run, tasks, groups),
            "lost": len(result.lost),
            "policy_version": self.version,
            "seconds": time.perf_counter() - started,
        }

    # Checkpoints.

    def checkpoint(self) -> Checkpoint:
        """Everything that an exact resume needs."""
        version = self.version

        def learner_state(learner: VLMLearner) -> tuple[AdapterPayload, dict[str, torch.Tensor], list[int]]:
            return learner.adapter(version), learner.moments(), torch.get_rng_state().tolist()

        adapter, moments, torch_rng = self.on_learner(learner_state)
        state = {
            "updates": self.updates,
            "rollouts": self.rollouts.state(),
            "rng": self.rng.bit_generator.state,
            "torch_rng": torch_rng,
            "restarts": dict(self.restarts),
        }
        return Checkpoint(adapter, moments, state)

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Tune's hook; the folder holds safetensors and JSON, no pickle."""
        write_checkpoint(Path(checkpoint_dir), self.checkpoint())

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Tune's hook, and `--resume`."""
        self._restore(read_checkpoint(Path(checkpoint_dir)))
        self._last_checkpoint = Path(checkpoint_dir)

    def remember_checkpoint(self, folder: Path) -> None:
        """Use this checkpoint when learners must be replaced."""
        self._last_checkpoint = folder

    def restore_learners(self) -> None:
        """Go back to the last checkpoint, or to the beginning; the iterations since then are done again."""
        lost = self.updates
        if self._last_checkpoint is not None:
            self._restore(read_checkpoint(self._last_checkpoint))
        else:
            self.updates = 0
            rollouts, self.rng.bit_generator.state = self._beginning
            self.rollouts.restore(rollouts, counts=False)
            version = self.version
            self._publish_restored(self.on_learner(lambda learner: learner.adapter(version)))
        self.rollouts.dropped["iterations_repeated"] += lost - self.updates
        self.updates -= 1  # `training_step` counts this iteration, in which nothing was learned

    def _restore(self, checkpoint: Checkpoint) -> None:
        moments, state = checkpoint.moments, checkpoint.state
        arrays = {name: tensor.numpy() for name, tensor in checkpoint.adapter.state().items()}
        torch_rng = state["torch_rng"]

        def load(learner: VLMLearner) -> bool:
            learner.restore(arrays, moments)
            torch.set_rng_state(torch.tensor(torch_rng, dtype=torch.uint8))
            return True

        on_every_learner(self.learner_group, load)
        self.updates = int(state["updates"])
        self.rng.bit_generator.state = state["rng"]
        fresh = self.version == 0 and not self.service.newest_version()
        self.rollouts.restore(state["rollouts"], counts=fresh)
        if fresh:
            # A new process continues with the checkpoint's counts.
            self.restarts = Counter(state["restarts"])
            self._publish(checkpoint.adapter)
        else:
            self._publish_restored(checkpoint.adapter)

    def _publish_restored(self, adapter: AdapterPayload) -> None:
        """Publish old weights under a new version: versions only grow, and one version never has two contents."""
        self._publish(replace(adapter, version=max(self.service.newest_version(), self.version) + 1))

    def remember_groups(self, groups: Sequence[TrajectoryGroup], plan: UpdatePlan) -> None:
        """Keep the groups of this iteration and their advantages, for the dump of trajectories."""
        self.last_groups, self.last_advantages = list(groups), plan.advantages
