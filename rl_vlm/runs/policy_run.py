"""`rl-vlm train`: one run from its configuration to its result, with checkpoints, evaluation, resume and clean endings."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from rl_vlm.algorithms.checkpoint import clean_leftovers, latest_checkpoint, save_checkpoint
from rl_vlm.config import RunConfig
from rl_vlm.imports import import_meanwhile
from rl_vlm.monitoring.display import ProgressDisplay
from rl_vlm.monitoring.recorder import RunRecorder
from rl_vlm.runs.lifecycle import RunLifecycle
from rl_vlm.types import RLVLMError, UserInputError


def default_run_dir(run: RunConfig) -> Path:
    """`runs/<name>`."""
    return Path("runs") / run.name


def dry_run(run: RunConfig) -> dict[str, Any]:
    """Check everything that can be checked without starting Ray: model folder, data, environment, resources.

    Returns what was found, as figures for people. Raises UserInputError.
    """
    from rl_vlm.runs.preflight import inspect_run

    return inspect_run(run)


def prepare_run_dir(folder: Path, resume: bool, overwrite: bool) -> None:
    """Make the run folder; an existing one is refused unless it is to be resumed or overwritten."""
    if folder.exists() and not folder.is_dir():
        raise UserInputError(f"{folder} is a file: choose another --run-dir.")
    if folder.is_dir() and any(folder.iterdir()):
        if overwrite and not resume:
            if not (folder / "config.yaml").is_file():
                raise UserInputError(
                    f"{folder} does not look like a run folder: delete it yourself, or choose another."
                )
            shutil.rmtree(folder)
        elif not resume:
            raise UserInputError(
                f"The run folder {folder} exists: choose another --run-dir, or add --resume or --overwrite."
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserInputError(f"Cannot make the run folder {folder}: {error.strerror}.") from error


def train(
    run: RunConfig, run_dir: Path | None = None, *, resume: bool = False, overwrite: bool = False
) -> dict[str, Any]:
    """Run to the end and return the content of `result.json`.

    Raises UserInputError before anything is touched, InterruptedRun after a signal, RLVLMError when the run fails.
    """
    dry_run(run)
    from rl_vlm.runs.cluster import check_resources, joins_cluster

    if not joins_cluster():
        check_resources(run)
    folder = (run_dir or default_run_dir(run)).absolute()
    prepare_run_dir(folder, resume, overwrite)
    if run.algorithm.name == "preference_sac":
        from rl_vlm.runs.preference_run import PreferenceRun

        return PreferenceRun(run, folder, resume).execute()
    return _Run(run, folder, resume).execute()


class _Run(RunLifecycle):
    """A GRPO run."""

    def __init__(self, run: RunConfig, folder: Path, resume: bool) -> None:
        self.checkpoints = folder / "checkpoints"
        clean_leftovers(self.checkpoints)
        self.start_from = latest_checkpoint(self.checkpoints) if resume else None
        start = int(self.start_from.name.removeprefix("iteration-")) if self.start_from else 0
        super().__init__(run, folder, start, resume, ProgressDisplay(run.algorithm.iterations, start))
        self.evaluations: list[dict[str, Any]] = []
        self.saved_iteration = -1
        self.last_iteration = start

    def _loop(self) -> None:
        import_meanwhile("torch", "transformers.modeling_utils")
        from rl_vlm.runs.cluster import ray_cluster
        from rl_vlm.serving.publisher import serving_ahead

        self.display.message(f"Starting Ray, {self.run.serving.num_replicas} replicas and the learner ...")
        with ray_cluster(self.run), serving_ahead(self.run, self.folder / "serving"):
            from rl_vlm.algorithms.grpo import GRPOConfig

            with self._algorithm(GRPOConfig.from_run_config(self.run, self.folder)):
                self._train()

    def _train(self) -> None:
        from rl_vlm.rollout.sampler import RoundAbandonedError

        algorithm = self.algorithm
        if self.start_from is not None:
            algorithm.load_checkpoint(str(self.start_from))
            self.display.message(f"Resumed from iteration {algorithm.updates}.")
        self._started()
        # A signal that comes while sampling ends the round: nothing of it is in the weights.
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
            # Learners were replaced from a checkpoint: the iterations since then are done again.
            self.recorder.close()
            self.recorder = RunRecorder(self.folder, run, resumed_iteration=iteration - 1)
        self.last_iteration = iteration
        if "reward/mean" in metrics:
            self.rewards.append(metrics["reward/mean"])
        self.recorder.log_iteration(iteration, metrics)
        self.display.update(iteration, metrics)
        every = run.logging.trajectories_every
        if every and (iteration - 1) % every == 0 and algorithm.last_groups:
            self.recorder.dump_trajectories(
                iteration, algorithm.last_groups, algorithm.last_advantages, algorithm.decode
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
    return {
        "updates": algorithm.updates,
        "version": algorithm.version,
        "trajectories": algorithm.trajectories,
        "dropped": dict(algorithm.dropped),
        "restarts": dict(algorithm.restarts),
        "requests_by_replica": dict(algorithm.requests_by_replica),
    }
