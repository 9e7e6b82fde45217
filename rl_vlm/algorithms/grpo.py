"""GRPO: sample groups from the served policy, subtract each group's mean reward, take clipped policy-gradient steps.

DeepSeekMath (arXiv 2402.03300) with DAPO's clip-higher (arXiv 2503.14476) and truncated importance sampling. One
iteration: env runners sample complete groups through Ray Serve; the learner group updates the LoRA weights; the new
adapter version goes to every replica. With `max_policy_lag` 0 these follow each other, otherwise sampling of later
rounds runs while the learner learns.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayError
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from rl_vlm.algorithms.base_config import RunAlgorithmConfig
from rl_vlm.algorithms.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from rl_vlm.algorithms.learners import LearnerLostError, on_every_learner, on_one_learner
from rl_vlm.config import RunConfig
from rl_vlm.envs.base import ObservationSpace, TextSpace
from rl_vlm.envs.registry import make
from rl_vlm.evaluation.heldout import evaluation_tasks, summarize
from rl_vlm.learning.learner import UpdateBatch, UpdateResult, VLMLearner
from rl_vlm.learning.losses import get_loss
from rl_vlm.learning.plan import UpdatePlan, plan_update
from rl_vlm.learning.update import UpdateStats, linear_schedule
from rl_vlm.models.adapter import AdapterPayload
from rl_vlm.models.loading import TextSide, load_text_side
from rl_vlm.rollout.cursor import DataCursor
from rl_vlm.rollout.env_runner import VLMEnvRunner
from rl_vlm.rollout.retry import FailureBudget
from rl_vlm.rollout.sampler import RolloutSampler, Round
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.seeding import derive_seed
from rl_vlm.serving.publisher import PolicyService, start_service
from rl_vlm.types import RLVLMError, TrajectoryGroup


class LearnerDiedError(RLVLMError):
    """A learner died and could not be replaced."""


class GRPOConfig(RunAlgorithmConfig):
    """RLlib's configuration of GRPO."""

    def __init__(self, algo_class: type[Algorithm] | None = None) -> None:
        self.run_id = ""
        self.model_folder: Path | None = None
        super().__init__(algo_class or GRPO)

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
        self.training(learner_class=VLMLearner, lr=run.learner.lr)

    def prepare(self, service: PolicyService) -> None:
        """Fill in what is known only where the algorithm runs: the served policy's run id and model folder."""
        self.run_id, self.model_folder = service.run_id, service.model
        self._apply_run_config()

    def get_default_rl_module_spec(self) -> RLModuleSpec:
        """RLlib asks for the module that the learners train."""
        on_gpu = self.run_config.learner.gpus_per_learner > 0 and torch.cuda.is_available()
        from rl_vlm.learning.module import VLMModule  # where the module is built; env runners need none of it

        settings = {
            "folder": self.model_folder,
            "run_config": self.run_config,
            "device": "cuda" if on_gpu else "cpu",
        }
        return RLModuleSpec(module_class=VLMModule, model_config=settings)


class GRPO(Algorithm):
    """The training loop. One `train()` is one GRPO iteration, so Tune can run it as it is."""

    learner_group: Any
    env_runner_group: Any

    @classmethod
    def get_default_config(cls) -> GRPOConfig:
        """RLlib asks for this."""
        return GRPOConfig()

    def setup(self, config: AlgorithmConfig) -> None:
        """Start serving, env runners and learners."""
        config = self.get_default_config().own_copy(config)
        self.run: RunConfig = config.run_config
        scratch = config.scratch_folder or Path(self.logdir)
        # Replicas load while env runners and learners start.
        self._service = start_service(self.run, scratch / "serving")
        try:
            config.prepare(self._service)
            config.freeze()
            self.config = config
            super().setup(config)
            self._prepare()
            self._service.wait_until_ready()
        except BaseException:
            # On a cluster that was joined, replicas would outlive a failed start.
            self._service.stop()
            raise

    def _prepare(self) -> None:
        """The algorithm's own state."""
        self._sampler = RolloutSampler(self.env_runner_group, self.run.rollout.timeout_s)
        self._failures = FailureBudget(self.run.rollout.max_consecutive_failures)
        env = make(self.run.env.id, **self.run.env.make_kwargs())
        self._num_train = self.run.env.num_items or env.num_items("train")
        self._num_test = env.num_items(self.run.evaluation.split)
        env.close()
        self._cursor = DataCursor(self._num_train, self.run.seed)
        self._rng = np.random.default_rng(derive_seed(self.run.seed, 1))
        self._rounds: deque[Round] = deque()
        self._ahead: tuple[list[RolloutTask], dict[str, Any]] | None = None  # tasks whose episodes are being opened
        self._last_checkpoint: Path | None = None
        self._text: TextSide | None = None
        self._weights: dict[str, float] = {}  # the last publication's report
        self.updates = 0  # GRPO iterations that are in the weights
        self.version = 0
        self.trajectories = 0
        self.dropped: Counter[str] = Counter()
        self.restarts: Counter[str] = Counter()
        self.requests_by_replica: Counter[str] = Counter()
        self.last_groups: list[TrajectoryGroup] = []
        self.last_advantages: list[np.ndarray] = []
        self.last_metrics: dict[str, float] = {}
        self._clock: defaultdict[str, float] = defaultdict(float)
        self.stop_requested: Callable[[], bool] = lambda: False

    # One iteration.

    def training_step(self) -> None:
        """Sample, compute advantages, learn, publish."""
        started = time.perf_counter()
        self._clock.clear()
        groups = self._next_groups()
        metrics = self._sampling_metrics(groups)
        if groups:
            with self._timed("advantages"):
                plan = plan_update(
                    groups,
                    self.run.algorithm,
                    self._rng,
                    aggregation=get_loss(self.run.algorithm.loss)[1],
                    num_learners=max(self.run.learner.num_learners, 1),
                    max_new_tokens=self.run.rollout.max_new_tokens,
                )
            metrics |= self._plan_metrics(plan, groups)
            self._open_next_round()
            with self._timed("learn"):
                stats = self._learn(plan)
            metrics |= stats.metrics()
            self.last_groups, self.last_advantages = groups, plan.advantages
        self.updates += 1
        metrics |= {
            "weights/version": float(self.version),
            **self._weights,
            "time/step": time.perf_counter() - started,
            **{f"time/{name}": seconds for name, seconds in self._clock.items()},
            **{f"dropped/{reason}": float(count) for reason, count in self.dropped.items()},
            **{f"restarts/{part}": float(count) for part, count in self.restarts.items()},
        }
        self.last_metrics = metrics
        for name, value in metrics.items():
            self.metrics.log_value(tuple(name.split("/")), value, window=1)

    def _next_groups(self) -> list[TrajectoryGroup]:
        """Complete groups no older than `max_policy_lag`; starts the rounds that the lag allows."""
        lag = self.run.rollout.max_policy_lag
        with self._timed("sample"):
            if not self._rounds:
                self._start_round()
            groups, result = self._sampler.collect(self._rounds[0], self.stop_requested)
            self._rounds.popleft()
        self._clock["env"] += result.timings.get("env", 0.0)
        self._clock["runner"] += result.timings.get("sample", 0.0)
        self.dropped.update(result.dropped)
        self.restarts["env_runner"] = self._sampler.restarts
        if result.client.get("retries"):
            self.dropped["request_retries"] += result.client["retries"]
        self.dropped["group_lost"] += len(result.lost)
        if not result.lost:
            del self.dropped["group_lost"]
        self._failures.record(len(groups), result.lost)
        fresh = [group for group in groups if self.version - group.oldest_version <= lag]
        if len(fresh) < len(groups):
            self.dropped["too_old"] += len(groups) - len(fresh)
        # The next rounds are sampled by the weights of now, while the learner works.
        while len(self._rounds) < lag and self.updates + len(self._rounds) + 1 < self.run.algorithm.iterations:
            self._start_round()
        return fresh

    def _start_round(self) -> None:
        tasks, cursor = self._ahead or self._next_tasks(self.updates + len(self._rounds))
        self._ahead = None
        work = self._sampler.start([replace(task, min_version=self.version) for task in tasks], self.version)
        work.cursor = cursor
        self._rounds.append(work)

    def _open_next_round(self) -> None:
        """Opening episodes and encoding their images does not need the weights that are learned meanwhile."""
        rollout, number = self.run.rollout, self.updates + 1
        if not rollout.open_ahead or rollout.max_policy_lag or number >= self.run.algorithm.iterations:
            return
        if self.run.deterministic:
            return  # features of another batch differ in their last bits
        self._ahead = self._next_tasks(number)
        self._sampler.prepare(self._ahead[0])

    def _next_tasks(self, number: int) -> tuple[list[RolloutTask], dict[str, Any]]:
        """The tasks of iteration `number`, and the data cursor before they were taken."""
        rollout, cursor = self.run.rollout, self._cursor.state()
        every = self.run.logging.trajectories_every
        record = bool(every) and number % every == 0
        tasks = [
            RolloutTask(
                group_id=f"{number:06d}:{place:05d}",
                index=index,
                split="train",
                seed=derive_seed(self.run.seed, 2, index),
                sampling_seed=derive_seed(self.run.seed, 3, number, place),
                size=rollout.group_size,
                temperature=rollout.temperature,
                min_version=self.version,
                record=record,
            )
            for place, index in enumerate(self._cursor.take(rollout.prompts_per_iteration))
        ]
        return tasks, cursor

    def _learn(self, plan: UpdatePlan) -> UpdateStats:
        learner, algorithm = self.run.learner, self.run.algorithm
        lr = learner.lr
        if learner.lr_schedule == "linear":
            lr *= linear_schedule(self.updates, algorithm.iterations, learner.lr_final_fraction)
        batches = [UpdateBatch(shard, plan.active, algorithm.epochs, lr, self.version + 1) for shard in plan.shards]
        try:
            if self.learner_group.is_local:
                data = TrainingData(episodes=batches)
            else:
                data = TrainingData(episodes_refs=[ray.put([batch]) for batch in batches])
            results: list[UpdateResult] = self.learner_group.update(training_data=data)
            if len(results) < len(batches):  # RLlib leaves out learners that it knows to be dead
                raise LearnerLostError(f"{len(batches) - len(results)} of {len(batches)} learners are gone")
        except (RayError, RuntimeError, LearnerLostError) as error:
            # RuntimeError: the collective of a surviving learner breaks when its peer dies.
            if self.learner_group.is_local:
                raise
            self._replace_learners(error)
            return UpdateStats()
        adapter = next(result.adapter for result in results if result.adapter is not None)
        with self._timed("publish"):
            self._publish(adapter)
        stats = UpdateStats.merge([result.stats for result in results])
        stats.lr = lr
        return stats

    def _publish(self, adapter: AdapterPayload) -> None:
        previous = self._service.publish(adapter)
        if previous is not None:
            self._weights = {"weights/publish_s": previous.seconds, "weights/acked": float(len(previous.acked))}
        self.version = adapter.version

    def _replace_learners(self, error: Exception) -> None:
        """Start new learners from the last checkpoint (or from the beginning) and publish their weights."""
        self.restarts["learner"] += 1
        if self.restarts["learner"] > self.run.learner.max_restarts:
            raise LearnerDiedError(
                f"A learner died {self.restarts['learner']} times, the last time with: {error}. Raise "
                "learner.max_restarts, or give the learners more memory."
            ) from error
        self.learner_group.shutdown()
        self.learner_group = self.config.build_learner_group(
            rl_module_spec=self.config.get_multi_rl_module_spec(spaces=self.spaces, inference_only=False)
        )
        lost = self.updates
        if self._last_checkpoint is not None:
            self._restore(read_checkpoint(self._last_checkpoint))
        else:
            self.updates = 0
            if self._ahead is not None:
                self._cursor.restore(self._ahead[1])
                self._ahead = None
            self._publish_restored(self._adapter_of_learners())
        self.dropped["iterations_repeated"] += lost - self.updates
        self.updates -= 1  # training_step adds this iteration, which taught nothing

    def _adapter_of_learners(self) -> Any:
        version = self.version
        return self._on_learner(lambda learner: learner.adapter(version))

    def _on_learner(self, function: Any) -> Any:
        return on_one_learner(self.learner_group, function)

    def _publish_restored(self, adapter: AdapterPayload) -> None:
        """Publish old weights under a new version: versions only grow, and one version never has two contents."""
        version = max(self._service.newest_version(), self.version) + 1
        self._service.publish(replace(adapter, version=version))
        self.version = version

    # Figures.

    def _sampling_metrics(self, groups: list[TrajectoryGroup]) -> dict[str, float]:
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        self.trajectories += len(trajectories)
        for trajectory in trajectories:
            self.requests_by_replica.update(trajectory.replica_ids)
        if not trajectories:
            return {}
        rewards = np.array([trajectory.reward for trajectory in trajectories])
        tokens = sum(trajectory.num_sampled for trajectory in trajectories)
        metrics = {
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
            "rollout/turns": float(np.mean([len(trajectory.turns) for trajectory in trajectories])),
            "rollout/tokens": float(tokens),
            "rollout/tokens_per_s": tokens / max(self._clock["sample"], 1e-9),
            "rollout/truncated": float(np.mean([t.status == "truncated" for t in trajectories])),
            "rollout/groups": float(len(groups)),
            "rollout/lag_max": float(max(self.version - group.oldest_version for group in groups)),
        }
        for turn in range(2, self.run.rollout.max_turns + 1):
            share = float(np.mean([len(trajectory.turns) >= turn for trajectory in trajectories]))
            if share or turn == 2:
                metrics[f"rollout/reached_turn_{turn}"] = share
        for key in ("correct", "tool_calls", "tool_errors"):
            values = [t.info[key] for t in trajectories if isinstance(t.info.get(key), (bool, int, float))]
            if values:
                metrics[f"rollout/{key}"] = float(np.mean(values))
        return metrics

    def _plan_metrics(self, plan: UpdatePlan, groups: list[TrajectoryGroup]) -> dict[str, float]:
        return {"reward/zero_advantage_groups": plan.zero_advantage_groups / len(groups)}

    def decode(self, token_ids: np.ndarray) -> str:
        """Token ids as text, special tokens included."""
        if self._text is None:
            self._text = load_text_side(self.config.model_folder)
        return self._text.codec.decode(token_ids)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self._clock[name] += time.perf_counter() - started

    # Held-out evaluation.

    def evaluate_policy(self) -> dict[str, Any]:
        """Greedy (and, with `evaluation.samples` above 1, pass@k) accuracy on the held-out split, per variant."""
        started = time.perf_counter()
        tasks = evaluation_tasks(self.run, self._num_test, self.version)
        work = self._sampler.start(tasks, self.version, self.run.evaluation.timeout_s)
        groups, result = self._sampler.collect(work, self.stop_requested)
        self._failures.record(len(groups), result.lost)
        self.restarts["env_runner"] = self._sampler.restarts
        if died := result.dropped.get("runner_died"):
            self.dropped["runner_died"] += died
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
        adapter = self._on_learner(lambda learner: learner.adapter(version))
        moments = self._on_learner(lambda learner: learner.moments())
        state = {
            "updates": self.updates,
            # Rounds that are still being sampled are sampled anew after a resume: none of their items is skipped.
            "cursor": self._next_cursor(),
            "rng": self._rng.bit_generator.state,
            "torch_rng": self._on_learner(lambda learner: torch.get_rng_state().tolist()),
            "trajectories": self.trajectories,
            "dropped": dict(self.dropped),
            "restarts": dict(self.restarts),
            "requests_by_replica": dict(self.requests_by_replica),
        }
        return Checkpoint(adapter, moments, state)

    def _next_cursor(self) -> dict[str, Any]:
        if self._rounds:
            return self._rounds[0].cursor
        return self._ahead[1] if self._ahead else self._cursor.state()

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Tune's hook; the folder holds safetensors and JSON, no pickle."""
        write_checkpoint(Path(checkpoint_dir), self.checkpoint())

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Tune's hook, and `--resume`."""
        self._restore(read_checkpoint(Path(checkpoint_dir)))
        self._last_checkpoint = Path(checkpoint_dir)

    def remember_checkpoint(self, folder: Path) -> None:
        """Dead learners are replaced from here."""
        self._last_checkpoint = folder

    def _restore(self, checkpoint: Checkpoint) -> None:
        adapter, moments, state = checkpoint.adapter.state(), checkpoint.moments, checkpoint.state
        arrays = {name: tensor.numpy() for name, tensor in adapter.items()}
        torch_rng = state["torch_rng"]

        def load(learner: VLMLearner) -> bool:
            learner.restore(arrays, moments)
            torch.set_rng_state(torch.tensor(torch_rng, dtype=torch.uint8))
            return True

        on_every_learner(self.learner_group, load)
        self.updates = int(state["updates"])
        self._cursor.restore(state["cursor"])
        self._rng.bit_generator.state = state["rng"]
        self._rounds.clear()
        self._ahead = None
        if self.version == 0 and not self._service.newest_version():
            # A fresh process goes on with the numbers of the checkpoint.
            self._service.publish(checkpoint.adapter)
            self.version = checkpoint.adapter.version
            self.trajectories = int(state["trajectories"])
            self.dropped = Counter(state["dropped"])
            self.restarts = Counter(state["restarts"])
            self.requests_by_replica = Counter(state["requests_by_replica"])
        else:
            self._publish_restored(checkpoint.adapter)

    def restore_env_runners(self, env_runner_group: Any) -> list[int]:
        """RLlib's hook before each step: the sampler revives runners itself, they have no state to restore."""
        return []

    def cleanup(self) -> None:
        """Stop env runners, learners and the served policy."""
        super().cleanup()
        service = getattr(self, "_service", None)
        if service is not None:
            service.stop()
