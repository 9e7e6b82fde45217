"""PolicyAlgorithm: what GRPO and PPO share: the served policy, the steps of an iteration, and their metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from rl_vlm import tracing
from rl_vlm.algorithms.base import RunAlgorithm, RunAlgorithmConfig
from rl_vlm.algorithms.checkpoint import Checkpoint, read_checkpoint, write_checkpoint
from rl_vlm.algorithms.evaluation import HeldOutItems, Items
from rl_vlm.algorithms.sight_probe import SightProbe
from rl_vlm.config import AlgorithmSection, PolicyConfig
from rl_vlm.envs.base import ObservationSpace, TextSpace
from rl_vlm.envs.registry import survey
from rl_vlm.evaluation.sight_faults import Fault
from rl_vlm.learning.batching import Minibatch
from rl_vlm.learning.experience import Estimate, Experience, flat
from rl_vlm.learning.learner import VLMLearner, VLMModule
from rl_vlm.learning.optimizer import lr_factor
from rl_vlm.learning.plan import (
    ScoreBatch,
    Scores,
    TokenRecord,
    UpdateResult,
    UpdateStats,
    divide,
    estimate_advantages,
    make_experience,
    update_batches,
)
from rl_vlm.learning.returns import ReturnScale, explained_variance
from rl_vlm.models.images import TextSide
from rl_vlm.models.loading import load_text_side
from rl_vlm.models.memory.placement import shares_gpu
from rl_vlm.models.weights import WeightPayload
from rl_vlm.rollout.curriculum import make_task_source
from rl_vlm.rollout.env_runner import VLMEnvRunner
from rl_vlm.rollout.metrics import group_metrics, sampling_metrics
from rl_vlm.rollout.rollouts import make_rollouts
from rl_vlm.rollout.task_stream import TaskStream
from rl_vlm.rollout.tasks import View
from rl_vlm.seeding import derive_seed
from rl_vlm.serving.service import PolicyService, start_service
from rl_vlm.statistics import mean_kl
from rl_vlm.types import RLVLMError, Trajectory, TrajectoryGroup


class PolicyAlgorithmConfig(RunAlgorithmConfig):
    """RLlib's configuration of an algorithm that trains the served policy."""

    run_config: PolicyConfig
    runner_class = VLMEnvRunner

    def _apply_run_config(self) -> None:
        super()._apply_run_config()
        run_config = self.run_config
        self.environment(env=None, observation_space=ObservationSpace(), action_space=TextSpace())
        self.env_runners(
            num_env_runners=run_config.rollout.num_env_runners,
            num_cpus_per_env_runner=run_config.rollout.cpus_per_env_runner,
        )
        self.learners(learner_class=VLMLearner)
        self.training(lr=run_config.learner.lr)

    def get_default_rl_module_spec(self) -> RLModuleSpec:
        settings = {"model": self.served_model, "run_config": self.run_config}
        return RLModuleSpec(module_class=VLMModule, model_config=settings)


class PolicyAlgorithm(RunAlgorithm):
    """The policy loop. A subclass writes an iteration (`iterate`) out of the steps below: sample, estimate, learn,
    publish.

    Collaborators: `learners`, `rollouts` (groups from the env runners), `held_out_items` and `sight` (what the policy
    does with images). `last_checkpoint` is the one that new learners start from.
    """

    run_config: PolicyConfig
    name: ClassVar[Literal["grpo", "ppo", "distill"]]  # `algorithm.name`

    @classmethod
    def get_default_config(cls) -> PolicyAlgorithmConfig:
        return PolicyAlgorithmConfig(cls, PolicyConfig(algorithm=AlgorithmSection(name=cls.name)))

    def start_services(self, config: PolicyAlgorithmConfig) -> None:
        service = self._service = config.service or start_service(self.run_config)
        config.run_id, config.policy_key, config.served_model = service.run_id, service.key, service.model
        if shares_gpu(self.run_config):
            # vLLM rejects a GPU on which less is free than it was promised.
            service.wait_until_ready()

    @property
    def service(self) -> PolicyService:
        assert self._service is not None
        return self._service

    def make_state(self) -> None:
        run_config = self.run_config
        splits = survey(run_config.env, "train", run_config.evaluation.split)
        self.env_metrics = splits.metrics
        stream = TaskStream(make_task_source(run_config, splits.sizes["train"]), run_config)
        self.rollouts = make_rollouts(self.runners, stream, run_config)
        held_out_sizes = splits.sizes[run_config.evaluation.split]
        self.held_out_items = HeldOutItems(run_config, held_out_sizes, self.env_metrics, self.rollouts)
        self.rollouts.stop_requested = lambda: self.stop_requested()  # which is set later
        self.rng = np.random.default_rng(derive_seed(run_config.seed, 1))
        self.version = 0
        self.updates = 0  # iterations that are in the weights
        settings = run_config.algorithm
        # An adapted coefficient that began at 0 would stay there.
        self.kl_coef = max(settings.kl_coef, _KL_BOUNDS[0]) if settings.kl_target else settings.kl_coef
        self.return_scale = ReturnScale()
        self.last_groups: list[TrajectoryGroup] = []
        self.last_advantages: list[np.ndarray] = []  # float64 [G] per group, the mean over a trajectory's tokens
        self.last_tokens = TokenRecord()
        self._text: TextSide | None = None
        self._recorded: dict[str, float] = {}  # metrics of the running iteration
        self._publication: dict[str, float] = {}  # metrics of the last publication that was acknowledged
        self._beginning = self.state()
        self.last_checkpoint: Path | None = None
        self._earlier_restarts = 0  # of env runners, in processes before this one
        self.service.wait_until_ready()
        if run_config.model.adapter is not None:
            # All tasks ask for at least this version, so no replica answers as the base model.
            self.publish(self.learners.call(lambda learner: learner.policy.payload(1)))
        self.first_version = self.version
        self.sight = SightProbe(run_config, self._sight_logprobs, self._sight_samples)
        self.sight_faults: list[Fault] = []  # of the last iteration

    # One iteration.

    def training_step(self) -> None:
        self._recorded = {}
        self.last_groups, self.last_advantages, self.last_tokens = [], [], TokenRecord()
        super().training_step()
        self.last_spans += self.rollouts.take_spans()
        self.updates += 1

    def iteration_metrics(self, seconds: float) -> dict[str, float]:
        if self.run_config.rollout.max_policy_lag and "rollout/tokens" in self._recorded:
            # Sampling goes on all the time, so waiting is not what it took.
            self._recorded["rollout/tokens_per_s"] = self._recorded["rollout/tokens"] / seconds
        self.count_env_runners()
        version = {"weights/version": float(self.version)}
        return self._recorded | version | self._publication | self.rollouts.metrics()

    @property
    def iterations_left(self) -> int:
        """Iterations after the running one."""
        return max(self.run_config.algorithm.iterations - self.updates - 1, 0)

    def sample(self) -> list[TrajectoryGroup]:
        """The groups that this iteration learns from; none where all were lost."""
        run_config = self.run_config
        with self.timed("sample"):
            groups = self.rollouts.next_groups(self.version, self.iterations_left)
        self._recorded |= sampling_metrics(
            groups, self.version, self._clock["sample"], run_config.rollout.max_turns, self.rollouts.crosses_versions
        )
        self._recorded |= group_metrics(self.env_metrics, groups)
        if groups:
            with self.timed("sight"):
                metrics, self.sight_faults = self.sight.measure(groups, self.version, self.updates)
            self._recorded |= metrics
        return groups

    def divide(self, groups: Sequence[TrajectoryGroup], estimate: Estimate | None = None) -> list[list[Minibatch]]:
        """The minibatches of an epoch, divided among the learners, without samples whose advantage is known to be 0."""
        return divide(groups, self.run_config, self.rng, estimate)

    def score(self, minibatches: Sequence[Sequence[Minibatch]]) -> Scores:
        """The critic's values, and the log-probabilities of policy and base model."""
        with self.timed("score"):
            return Scores.merge(self.learners.update([ScoreBatch(list(own)) for own in minibatches]))

    def estimate(self, groups: Sequence[TrajectoryGroup], scores: Scores | None = None) -> Estimate:
        """Advantages by the configured estimator and, with a critic, the returns that it learns."""
        with self.timed("advantages"):
            experience = make_experience(
                groups, self.run_config, self.rng, scores, kl_coef=self.kl_coef, scale=self.return_scale
            )
            estimate = self.advantages(experience)
        of_groups = [[estimate.advantages[t.trajectory_id] for t in group.trajectories] for group in groups]
        without = sum(not any(tokens.any() for tokens in group) for group in of_groups)
        self._recorded["reward/zero_advantage_groups"] = without / len(groups)
        self.last_groups = list(groups)
        self.last_advantages = [np.array([float(t.mean()) if len(t) else 0.0 for t in group]) for group in of_groups]
        self.last_tokens = TokenRecord(estimate.advantages, experience.values)
        if estimate.returns:
            values = flat(experience.values)
            returns = flat({name: estimate.returns[name] for name in experience.values})
            self._recorded["value/return"] = float(np.nanmean(returns)) if np.isfinite(returns).any() else 0.0
            self._recorded["value/explained_variance"] = explained_variance(values, returns)
        return estimate

    def advantages(self, experience: Experience) -> Estimate:
        """By the configured estimator."""
        return estimate_advantages(experience, self.run_config.algorithm)

    def learn(
        self,
        minibatches: Sequence[Sequence[Minibatch]],
        estimate: Estimate,
        *,
        scored: bool = False,
        learn_policy: bool = True,
    ) -> WeightPayload:
        """Clipped policy-gradient steps on the minibatches, or steps of the critic alone; returns the new weights.

        `scored`: the learners have packed the minibatches for `score`. Env runners open the next episodes meanwhile.
        """
        learner, algorithm = self.run_config.learner, self.run_config.algorithm
        factor = lr_factor(learner, self.updates, algorithm.iterations - 1)
        before = self.return_scale
        self.return_scale = before.observe(flat(estimate.returns))
        if self.iterations_left:
            self.rollouts.open_next()
        batches = update_batches(
            minibatches,
            estimate,
            self.return_scale,
            scored=scored,
            rescaling=before.rescaling_to(self.return_scale),
            epochs=algorithm.epochs,
            learn_policy=learn_policy,
            lr_factor=factor,
            version=self.version + 1,
            folder=self.service.folder,
            trace=tracing.traceparent(),
            record=any(group.recorded for group in self.last_groups),
        )
        results: list[UpdateResult] = self.learners.update(batches)
        for result in results:
            tracing.adopt(result.spans)
            self.last_tokens.logprobs |= result.tokens.logprobs
            self.last_tokens.entropies |= result.tokens.entropies
        stats = UpdateStats.merge([result.stats for result in results])
        self._recorded |= {**stats.metrics(), "policy/lr": learner.lr * factor}
        return next(result.adapter for result in results if result.adapter is not None)

    def adapt_kl(self, scores: Scores, learn_policy: bool = True) -> None:
        """Move the coefficient of the KL penalty in the reward towards `algorithm.kl_target`."""
        # KL(policy || reference), from log policy - log reference.
        kl = mean_kl(-np.concatenate(list(scores.log_ratio.values()) or [np.zeros(1)]))
        self._recorded |= {"policy/kl": kl, "policy/kl_coef": self.kl_coef}
        if learn_policy:  # while the critic learns alone the policy is the reference
            self.kl_coef = adapted_kl_coef(self.kl_coef, kl, self.run_config.algorithm)

    def publish(self, adapter: WeightPayload) -> None:
        """Send new weights to all replicas, which load them while they sample."""
        with self.timed("publish"):
            if self.run_config.model.train == "full" and self.run_config.published_dtype != "float32":
                adapter = adapter.rounded(self.run_config.published_dtype)  # masters, of a checkpoint: twice the bytes
            previous = self.service.publish(adapter)
        if previous is not None:
            self._publication = {"weights/publish_s": previous.seconds, "weights/acked": float(len(previous.acked))}
        self.version = adapter.version

    @contextmanager
    def replicas_at_rest(self) -> Iterator[None]:
        """Inside, the learner has the replicas' memory, where they take turns."""
        if not self.run_config.takes_turns:
            yield
            return
        version = self.version
        with self.timed("rest"):
            self.service.let_sleep(True)
        try:
            yield
        finally:
            if self.version == version:  # no new version has woken them
                self.service.let_sleep(False)

    # Metrics, evaluation and checkpoints.

    def count_env_runners(self) -> None:
        self.restarts["env_runner"] = self._earlier_restarts + self.runners.restarts

    @property
    def text(self) -> TextSide:
        if self._text is None:
            self._text = load_text_side(self.service.model.folder, self.run_config.model.pixels)
        return self._text

    def progress(self) -> tuple[int, int, int]:
        return self.updates, self.run_config.algorithm.iterations, self.run_config.evaluation.every

    def held_out(self) -> dict[str, float]:
        """Greedy accuracy and mean reward of the first variant."""
        (results, _), variant = self.evaluate_policy(), next(iter(self.run_config.evaluation.variants))
        return {name: float(results[f"{name}/{variant}"]) for name in ("accuracy", "reward")}

    def evaluate_policy(self, keep: int = 0) -> tuple[dict[str, Any], Items]:
        """`HeldOutItems.evaluate` with the weights that `evaluation.weights` names."""
        with self._evaluated_weights():
            results = self.held_out_items.evaluate(self.version, keep=keep, unseen=self.sight.needed)
        self.count_env_runners()
        return results

    def sample_held_out(self, count: int, *, greedy: bool = True) -> list[TrajectoryGroup]:
        """Episodes of the first held-out items by the policy as it is, with their messages."""
        temperature = 0.0 if greedy else self.run_config.rollout.temperature
        return self.held_out_items.sample(self.version, count, "shown", record=True, temperature=temperature)

    @contextmanager
    def _evaluated_weights(self) -> Iterator[None]:
        """Inside, the replicas hold what `evaluation.weights` names; each exchange takes a version."""
        version = self.version
        if self.run_config.evaluation.weights == "policy":
            yield
            return

        def give_back() -> None:
            self.publish_restored(self.learners.call(lambda learner: learner.policy.payload(version)))

        self.publish_restored(self.averaged_adapter())
        try:
            yield
        except Exception as error:  # raised again, with what went wrong after it
            try:
                give_back()
            except RLVLMError as second:  # such as a learner that is lost, which must not hide the first error
                error.add_note(str(second))
            raise
        give_back()  # an interruption does not wait for it

    def averaged_adapter(self) -> WeightPayload:
        """The average of the weights under `learner.ema_decay`. Raises LearnerLostError."""
        version = self.version
        return self.learners.call(lambda learner: learner.averaged_adapter(version))  # type: ignore[no-any-return]

    def _sight_logprobs(self, trajectories: Sequence[Trajectory], counterfactuals: bool) -> dict[str, list[np.ndarray]]:
        chosen = list(trajectories)
        with self.replicas_at_rest():  # the learner may need their memory
            return self.learners.call(  # type: ignore[no-any-return]
                lambda learner: learner.sight_logprobs(chosen, counterfactuals)
            )

    def _sight_samples(self, view: View) -> list[Trajectory]:
        # Sampled as in training: greedy answers have no log-probabilities to compare.
        how = {"view": view, "temperature": self.run_config.rollout.temperature}
        groups = self.held_out_items.sample(self.version, self.run_config.sight.items, f"sight/{view}", **how)
        return [group.trajectories[0] for group in groups]

    def state(self) -> dict[str, Any]:
        """The driver's part of a checkpoint, as JSON."""
        return {
            "updates": self.updates,
            "rollouts": self.rollouts.state(),
            "rng": self.rng.bit_generator.state,
            "kl_coef": self.kl_coef,
            "return_scale": asdict(self.return_scale),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from `state`; the rollouts are restored apart from it."""
        self.updates = int(state["updates"])
        self.rng.bit_generator.state = state["rng"]
        if self.run_config.algorithm.kl_target:  # a fixed one is the configuration's, which a resume may have changed
            self.kl_coef = float(state["kl_coef"])
        self.return_scale = ReturnScale(**state["return_scale"])

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Tune's hook; the folder holds safetensors and JSON, no pickle."""
        write_checkpoint(Path(checkpoint_dir), self.checkpoint())

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        self.go_on_from(read_checkpoint(Path(checkpoint_dir)), new_process=True)
        self.last_checkpoint = Path(checkpoint_dir)

    def checkpoint(self) -> Checkpoint:
        """Everything that an exact resume needs. Raises LearnerLostError."""
        version = self.version
        adapter, moments, extras, random = self.learners.call(lambda learner: learner.snapshot(version))
        state = {**self.state(), "torch_rng": random.tolist(), "restarts": dict(self.restarts)}
        return Checkpoint(adapter, moments, state, extras)

    def go_on_from(self, checkpoint: Checkpoint, *, new_process: bool) -> None:
        """Go on from a checkpoint; a new process also continues with its counts."""
        state = checkpoint.state
        random = torch.tensor(state["torch_rng"], dtype=torch.uint8)
        saved = checkpoint.adapter, checkpoint.moments, checkpoint.extras, random
        self.learners.call_each(lambda learner: learner.restore(*saved))
        self.set_state(state)
        newest = max(self.version, self.service.newest_version())
        fresh = new_process and newest <= self.first_version
        self.rollouts.restore(state["rollouts"], counts=fresh)
        if not fresh:
            self.publish_restored(checkpoint.adapter)
            return
        self.restarts.clear()
        self.restarts.update(state["restarts"])
        self._earlier_restarts = self.restarts["env_runner"]
        self.publish(checkpoint.adapter)

    def restore_learners(self) -> None:
        """Give new learners the last checkpoint, or the beginning; the iterations since then are done again."""
        lost, version = self.updates, self.version
        if self.last_checkpoint is not None:
            self.go_on_from(read_checkpoint(self.last_checkpoint), new_process=False)
        else:
            self.set_state(self._beginning)
            self.rollouts.restore(self._beginning["rollouts"], counts=False)
            self.publish_restored(self.learners.call(lambda learner: learner.policy.payload(version)))
        self.rollouts.dropped["iterations_repeated"] += lost - self.updates

    def publish_restored(self, adapter: WeightPayload) -> None:
        """Publish old weights under a new version: versions only grow, and one version never has two contents."""
        newest = max(self.service.newest_version(), self.version)
        self.publish(replace(adapter, version=newest + 1))


# The factor and the bounds of an adapted penalty.
_KL_RATE, _KL_BOUNDS = 1.5, (1e-5, 0.5)


def adapted_kl_coef(coefficient: float, kl: float, settings: AlgorithmSection) -> float:
    """The KL coefficient after an iteration of that KL per token: larger above twice its target, smaller below half."""
    if settings.kl_target is None:
        return coefficient
    if kl > 2 * settings.kl_target:
        coefficient *= _KL_RATE
    elif kl < settings.kl_target / 2:
        coefficient /= _KL_RATE
    return min(max(coefficient, _KL_BOUNDS[0]), _KL_BOUNDS[1])
