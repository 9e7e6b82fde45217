"""A run that trains the served policy: iterations, evaluations, checkpoints, and the final adapter."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from rl_vlm.algorithms.checkpoint import clean_leftovers, latest_checkpoint, save_checkpoint
from rl_vlm.config import RunConfig
from rl_vlm.monitoring.display import ProgressDisplay
from rl_vlm.runs.lifecycle import RunLifecycle
from rl_vlm.types import RLVLMError


class PolicyRun(RunLifecycle):
    """A run that trains the served policy."""

    def __init__(self, run: RunConfig, folder: Path, resume: bool) -> None:
        self.checkpoints = folder / "checkpoints"
        clean_leftovers(self.checkpoints)
        self.start_from = latest_checkpoint(self.checkpoints) if resume else None
        start = int(self.start_from.name.removeprefix("iteration-")) if self.start_from else 0
        super().__init__(run, folder, start, resume, ProgressDisplay(run.algorithm.iterations, start))
        self.evaluations: list[dict[str, Any]] = []
        self.saved_iteration = -1
        self.last_iteration = start

    def _train(self) -> None:
        from rl_vlm.rollout.sampler import RoundAbandonedError

        algorithm = self.algorithm
        if self.start_from is not None:
            algorithm.load_checkpoint(str(self.start_from))
            self.display.message(f"Resumed from iteration {algorithm.updates}.")
        self._started()
        # A signal during sampling ends the round, of which nothing has been learned yet.
        with suppress(RoundAbandonedError):
            if self.start_from is None or not self.recorder.has_evaluation(algorithm.updates):
                self._evaluate()
            with self._timed():
                while algorithm.updates < self.run.algorithm.iterations and not self.stop:
                    self._iterate()
        self._checkpoint()
        self._save_adapter()

    def _iterate(self) -> None:
        algorithm, run = self.algorithm, self.run
        algorithm.train()
        iteration, metrics = algorithm.updates, algorithm.last_metrics
        if iteration <= self.last_iteration:
            # Learners were replaced from a checkpoint: the iterations since then are done again, and this one learned nothing.
            self.recorder.close()
            self.recorder = self._new_recorder(iteration)
            self.last_iteration = iteration
            return
        self.last_iteration = iteration
        if "reward/mean" in metrics:
            self.rewards.append(metrics["reward/mean"])
        self.recorder.log_iteration(iteration, metrics)
        self.display.update(iteration, metrics)
        # Groups of a round that is recorded carry their conversations; with lag, rounds and iterations differ.
        recorded = [k for k, group in enumerate(algorithm.last_groups) if group.trajectories[0].messages]
        if recorded:
            groups, advantages = algorithm.last_groups, algorithm.last_advantages
            self.recorder.dump_trajectories(
                iteration, [groups[k] for k in recorded], [advantages[k] for k in recorded], algorithm.decode
            )
        if iteration % run.logging.checkpoint_every == 0:
            self._checkpoint()
        last = iteration >= run.algorithm.iterations
        if last or (run.evaluation.every and iteration % run.evaluation.every == 0):
            self._evaluate()

    def _evaluate(self) -> None:
        results = self.algorithm.evaluate_policy()
        self.evaluations.append({"iteration": self.algorithm.updates, **results})
        self.recorder.log_evaluation(self.algorithm.updates, results)
        self.display.evaluation(self.algorithm.updates, results)

    def _checkpoint(self) -> None:
        """Save a checkpoint. A full disk costs this checkpoint, not the run; the older ones stay."""
        from rl_vlm.algorithms.learners import LearnerLostError

        iteration = self.algorithm.updates
        if iteration == self.saved_iteration:
            return
        try:
            path = save_checkpoint(
                self.checkpoints, iteration, self.algorithm.checkpoint(), self.run.logging.keep_checkpoints
            )
        except OSError as error:
            self._cannot_write("a checkpoint", error)
            return
        except LearnerLostError as error:  # the next update replaces it, from the checkpoint before this one
            self.display.message(f"No checkpoint at iteration {iteration}. {error}")
            return
        self.saved_iteration = iteration
        self.algorithm.remember_checkpoint(path)

    def _save_adapter(self) -> None:
        try:
            self.algorithm.checkpoint().adapter.write(self.folder / "adapter")
            if self.run.learner.ema_decay is not None:
                self.algorithm.averaged_adapter().write(self.folder / "adapter-ema")
        except OSError as error:
            raise RLVLMError(
                f"Could not write the adapter to {self.folder} ({error.strerror or error}): free some space and --resume."
            ) from error

    def _outcome(self) -> dict[str, Any]:
        evaluations = self.recorder.evaluations() or self.evaluations
        variant = next(iter(self.run.evaluation.variants))
        accuracy = [e[f"accuracy/{variant}"] for e in evaluations if f"accuracy/{variant}" in e]
        counts = _counts(self.algorithm) if self.algorithm is not None else {}
        return {
            "iterations": counts.get("updates", 0),
            "accuracy_before": accuracy[0] if accuracy else None,
            "accuracy_after": accuracy[-1] if accuracy else None,
            "policy_version": counts.get("version", 0),
            **{name: counts.get(name, {}) for name in ("dropped", "restarts", "requests_by_replica")},
            "trajectories": counts.get("trajectories", 0),
        }


def _counts(algorithm: Any) -> dict[str, Any]:
    rollouts = algorithm.rollouts
    return {
        "updates": algorithm.updates,
        "version": algorithm.version,
        "trajectories": rollouts.trajectories,
        "dropped": dict(rollouts.dropped),
        "restarts": dict(algorithm.restarts),
        "requests_by_replica": dict(rollouts.requests_by_replica),
    }
