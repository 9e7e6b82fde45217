"""A run that trains the served policy: iterations, evaluations, checkpoints, and the final adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_vlm.config import PolicyConfig
from rl_vlm.evaluation.sight_faults import Fault, SightError, raise_or_warn
from rl_vlm.monitoring.display import episode_line
from rl_vlm.runs.hints import FIRST_ITERATIONS, SkippedSteps, blind, equal_rewards
from rl_vlm.runs.ray_run import RayRun
from rl_vlm.types import RLVLMError

if TYPE_CHECKING:
    from rl_vlm.algorithms.base import RunAlgorithm


class PolicyRun(RayRun):
    config: PolicyConfig

    def __init__(self, config: PolicyConfig, folder: Path, resume: bool) -> None:
        super().__init__(config, folder, resume, config.algorithm.iterations)
        self.last_iteration = self.start
        self._skipped_steps = SkippedSteps()

    @staticmethod
    def algorithm_class(config: PolicyConfig) -> type[RunAlgorithm]:
        from rl_vlm.algorithms.distill import Distill
        from rl_vlm.algorithms.grpo import GRPO
        from rl_vlm.algorithms.ppo import PPO

        return {"grpo": GRPO, "ppo": PPO, "distill": Distill}[config.algorithm.name]

    def _train(self) -> None:
        for _ in self.iterations():
            pass
        self.finish()

    def iterations(self) -> Iterator[int]:
        """Train to the end, a number per iteration that was learned from. Whatever loses a learner, the way back is
        here."""
        from rl_vlm.algorithms.learners import LearnerLostError

        while True:
            try:
                return (yield from self._to_the_end())
            except LearnerLostError as error:
                self._recover(error)

    def _recover(self, error: Exception) -> None:
        super()._recover(error)
        if self.algorithm.updates < self.last_iteration:
            self._forget_after(self.algorithm.updates)

    def _to_the_end(self) -> Iterator[int]:
        from rl_vlm.rollout.rollouts import TooManyFailuresError
        from rl_vlm.rollout.sampler import RoundAbandonedError, SamplingError

        algorithm = self.algorithm
        try:
            # A signal during sampling ends the round, of which nothing has been learned yet.
            with suppress(RoundAbandonedError):
                self._check_sight()
                if not self.recorder.has_evaluation(algorithm.updates):
                    self.evaluate()
                with self._timed():
                    while algorithm.updates < self.config.algorithm.iterations and self.goes_on:
                        self._iterate()
                        yield self.last_iteration
        except (SamplingError, TooManyFailuresError, SightError):
            self._report_failures()
            # The learners are there: a resume, with `sight.gate: warn` perhaps, need not repeat what these have
            # learned.
            if algorithm.updates > max(self.saved_at, 0):
                with suppress(RLVLMError):
                    self.checkpoint()
            raise

    def finish(self) -> None:
        """Save what was trained, also if a learner dies meanwhile."""
        from rl_vlm.algorithms.learners import LearnerLostError

        self._skipped_steps.check()
        reached = self.algorithm.updates
        while True:
            try:
                while self.algorithm.updates < reached:  # what new learners have lost
                    self._iterate()
                return self._save_all()
            except LearnerLostError as error:
                self._recover(error)

    def _save_all(self) -> None:
        self.checkpoint()
        self._save_trained(self.algorithm.checkpoint().adapter)
        if self.config.learner.ema_decay is not None:
            self._save_trained(self.algorithm.averaged_adapter(), "-ema")

    def _check_sight(self) -> None:
        if self.config.sight.gate == "off":
            return
        sight = self.algorithm.sight
        self._report_faults(sight.gate())
        if sight.needed:
            self.display.message(
                f"Sight: engine and learner agree within {sight.agreement:.1e} nats per token; a blank image changes "
                f"answers by {sight.effect:.2g}."
            )

    def _report_faults(self, faults: Sequence[Fault]) -> None:
        for sentence in raise_or_warn(faults, self.config.sight.gate):
            self.display.message(sentence)

    def _iterate(self) -> None:
        algorithm, config = self.algorithm, self.config
        algorithm.train()
        iteration, metrics = algorithm.updates, algorithm.last_metrics
        self.last_iteration = iteration
        self.recorder.log_iteration(iteration, metrics)
        self.recorder.log_spans(iteration, algorithm.last_spans)
        self._report_failures()
        self.display.update(iteration, metrics)
        if algorithm.sight_faults and config.sight.gate != "off":
            self._report_faults(algorithm.sight_faults)
        hints = [self._skipped_steps.look(iteration, metrics)]
        if iteration == FIRST_ITERATIONS and "reward/mean" in metrics:
            hints.append(equal_rewards(self.recorder.column("reward/zero_advantage_groups"), metrics["reward/mean"]))
        for hint in filter(None, hints):
            self.display.message(hint)
        # Groups of a round that is recorded carry their conversations; with lag, rounds and iterations differ.
        recorded = [group for group in algorithm.last_groups if group.recorded]
        if recorded:
            self.recorder.dump_trajectories(iteration, recorded, algorithm.last_tokens, algorithm.text)
            if config.logging.show_episodes:
                shown = recorded[iteration % len(recorded)].trajectories
                self.display.line(episode_line(shown[iteration % len(shown)]))
        if iteration % config.logging.checkpoint_every == 0:
            self.checkpoint()
        self._notify_callbacks("on_iteration", iteration, metrics)
        last = iteration >= config.algorithm.iterations or self.stopped_by
        if last or (config.evaluation.every and iteration % config.evaluation.every == 0):
            self.evaluate()

    def _report_failures(self) -> None:
        for reason in self.recorder.log_failures(self.algorithm.updates, self.algorithm.rollouts.take_failures()):
            self.display.message(f"A group was lost: {reason} (failures.jsonl keeps all reasons)")

    def _forget_after(self, iteration: int) -> None:
        metrics = self.recorder.ray
        self.recorder.close()
        self.recorder = self._new_recorder(iteration)
        self.recorder.ray, self.last_iteration = metrics, iteration
        self.saved_at = min(self.saved_at, iteration)

    def evaluate(self) -> dict[str, Any]:
        results, kept = self.algorithm.evaluate_policy(self.config.logging.kept_items)
        self.recorder.log_evaluation(self.algorithm.updates, results)
        if kept:
            self.recorder.dump_evaluation(self.algorithm.updates, kept, self.algorithm.text)
        self.display.evaluation(self.algorithm.updates, results)
        if self.algorithm.updates > self.start and (hint := blind(results)):
            self.display.message(hint)
        self._notify_callbacks("on_evaluation", self.algorithm.updates, results)
        return results

    def _save(self, position: int) -> Path:
        self.algorithm.last_checkpoint = saved = super()._save(position)
        return saved

    def _outcome(self) -> dict[str, Any]:
        variant, algorithm = next(iter(self.config.evaluation.variants)), self.algorithm
        rollouts = getattr(algorithm, "rollouts", None)
        return {
            **self._before_and_after("accuracy", f"accuracy/{variant}"),
            "policy_version": getattr(algorithm, "version", 0),
            "dropped": dict(getattr(rollouts, "dropped", {})),
            "restarts": dict(getattr(algorithm, "restarts", {})),
            "requests_by_replica": dict(getattr(rollouts, "requests_by_replica", {})),
            "trajectories": getattr(rollouts, "trajectories", 0),
            "skipped_steps": int(sum(self.recorder.column("policy/skipped_steps"))),
        }
