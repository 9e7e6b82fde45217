"""`rl-vlm train`: one run from its configuration to its result, with checkpoints, evaluation, resume and clean endings."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from rl_vlm.checkpoint import clean_leftovers, latest_checkpoint, save_checkpoint
from rl_vlm.cluster import check_resources, joins_cluster, ray_cluster
from rl_vlm.config import RunConfig, save_config
from rl_vlm.monitoring.display import ProgressDisplay
from rl_vlm.monitoring.recorder import RunRecorder
from rl_vlm.types import RLVLMError, UserInputError

logger = logging.getLogger("rl_vlm")


class InterruptedRun(RLVLMError):
    """SIGINT or SIGTERM ended the run after a checkpoint; `exit_code` is 130 or 143."""

    def __init__(self, number: int) -> None:
        super().__init__(f"Interrupted by {signal.Signals(number).name}; the checkpoint was saved, --resume goes on.")
        self.exit_code = 128 + number


class StopRequest:
    """Remembers the first SIGINT or SIGTERM; a second one, or any while starting, raises KeyboardInterrupt at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self.starting = True

    def __bool__(self) -> bool:
        return self.signal is not None

    @contextmanager
    def installed(self, announce: Callable[[str], None]) -> Iterator[None]:
        """Catch the signals inside this context."""

        def handle(number: int, _: FrameType | None) -> None:
            second, self.signal = self.signal is not None, number
            if second or self.starting:
                raise KeyboardInterrupt
            announce("Stopping: saving a checkpoint first. Once more to stop at once.")

        previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def default_run_dir(run: RunConfig) -> Path:
    """`runs/<name>`."""
    return Path("runs") / run.name


def dry_run(run: RunConfig) -> dict[str, Any]:
    """Check everything that can be checked without starting Ray: model folder, data, environment, resources.

    Returns what was found, as figures for people. Raises UserInputError.
    """
    from rl_vlm.preflight import inspect_run

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
    if not joins_cluster():
        check_resources(run)
    folder = (run_dir or default_run_dir(run)).absolute()
    prepare_run_dir(folder, resume, overwrite)
    if run.algorithm.name == "preference_sac":
        from rl_vlm.preference.training import PreferenceRun

        return PreferenceRun(run, folder, resume).execute()
    return _Run(run, folder, resume).execute()


class _Run:
    """The state of one `train` call."""

    def __init__(self, run: RunConfig, folder: Path, resume: bool) -> None:
        self.run, self.folder = run, folder
        self.checkpoints = folder / "checkpoints"
        clean_leftovers(self.checkpoints)
        self.start_from = latest_checkpoint(self.checkpoints) if resume else None
        start = int(self.start_from.name.removeprefix("iteration-")) if self.start_from else 0
        save_config(run, folder / "config.yaml")
        self.recorder = RunRecorder(folder, run, resumed_iteration=start if resume else None)
        self.display = ProgressDisplay(run.algorithm.iterations, start)
        self.stop = StopRequest()
        self.rewards: list[float] = []
        self.evaluations: list[dict[str, Any]] = []
        self.algorithm: Any = None
        self.started = time.monotonic()
        self.train_seconds = 0.0
        self.startup_seconds = 0.0
        self.write_errors = 0
        self.saved_iteration = -1
        self.last_iteration = start

    def execute(self) -> dict[str, Any]:
        status, error = "failed", ""
        try:
            with self.display, self.stop.installed(self.display.message):
                try:
                    self._loop()
                    status = "interrupted" if self.stop else "done"
                except KeyboardInterrupt:
                    self.stop.signal = self.stop.signal or signal.SIGINT
                    status = "interrupted"
                except RLVLMError as failure:
                    error = str(failure)
                    raise
                except Exception as failure:
                    error = f"{type(failure).__name__}: {failure}"
                    raise
                finally:
                    result = self._finish(status, error)
        finally:
            self.recorder.close()
        if status == "interrupted":
            raise InterruptedRun(self.stop.signal or signal.SIGINT)
        return result

    def _loop(self) -> None:
        from rl_vlm.algorithms.grpo import GRPOConfig
        from rl_vlm.rollout.sampler import RoundAbandonedError

        self.display.message(f"Starting Ray, {self.run.serving.num_replicas} replicas and the learner ...")
        with ray_cluster(self.run):
            config = GRPOConfig.from_run_config(self.run, self.folder)
            try:
                with stderr_to(self.folder / "startup.log"):
                    self.algorithm = algorithm = config.build_algo()
                algorithm.stop_requested = lambda: bool(self.stop)
                if self.start_from is not None:
                    algorithm.load_checkpoint(str(self.start_from))
                    self.display.message(f"Resumed from iteration {algorithm.updates}.")
                self.startup_seconds = time.monotonic() - self.started
                self.stop.starting = False
                begun = time.monotonic()
                try:
                    if self.start_from is None or not self.recorder.has_evaluation(algorithm.updates):
                        self._evaluate()
                    begun = time.monotonic()
                    while algorithm.updates < self.run.algorithm.iterations and not self.stop:
                        self._iterate()
                except RoundAbandonedError:
                    pass  # the signal came while sampling: nothing of that round is in the weights
                finally:
                    self.train_seconds = time.monotonic() - begun
                self._checkpoint()
                self._save_adapter()
            finally:
                if self.algorithm is not None:
                    self.counts = _counts(self.algorithm)
                    self.algorithm.stop()

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
        iteration = self.algorithm.updates
        if iteration == self.saved_iteration:
            return
        try:
            path = save_checkpoint(
                self.checkpoints, iteration, self.algorithm.checkpoint(), self.run.logging.keep_checkpoints
            )
        except OSError as error:
            self.write_errors += 1
            self.display.message(f"Could not save a checkpoint ({error.strerror or error}); going on without it.")
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

    def _finish(self, status: str, error: str) -> dict[str, Any]:
        counts: dict[str, Any] = getattr(self, "counts", {})
        evaluations = self.recorder.evaluations() or self.evaluations
        variant = next(iter(self.run.evaluation.variants))
        accuracy = [e[f"accuracy/{variant}"] for e in evaluations if f"accuracy/{variant}" in e]
        rewards = self.recorder.rewards() or self.rewards
        window = max(1, min(5, len(rewards)))
        result = {
            "status": status,
            "iterations": counts.get("updates", 0),
            "train_seconds": round(self.train_seconds, 3),
            "startup_seconds": round(self.startup_seconds, 3),
            "accuracy_before": accuracy[0] if accuracy else None,
            "accuracy_after": accuracy[-1] if accuracy else None,
            "reward_before": sum(rewards[:window]) / window if rewards else None,
            "reward_after": sum(rewards[-window:]) / window if rewards else None,
            "policy_version": counts.get("version", 0),
            "trajectories": counts.get("trajectories", 0),
            "dropped": counts.get("dropped", {}),
            "restarts": counts.get("restarts", {}),
            "requests_by_replica": counts.get("requests_by_replica", {}),
            "write_errors": self.write_errors + self.recorder.write_errors,
        }
        if error:
            result["error"] = error
        self.recorder.finish(result)
        return result


@contextmanager
def stderr_to(path: Path) -> Iterator[None]:
    """Ray's C++ side and RLlib write notes about their own plumbing to stderr while they start; keep them in a file.

    What really fails is raised as an exception.
    """
    with ExitStack() as stack:
        try:
            file = stack.enter_context(open(path, "ab"))
        except OSError:
            yield
            return
        sys.stderr.flush()
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)


def _counts(algorithm: Any) -> dict[str, Any]:
    return {
        "updates": algorithm.updates,
        "version": algorithm.version,
        "trajectories": algorithm.trajectories,
        "dropped": dict(algorithm.dropped),
        "restarts": dict(algorithm.restarts),
        "requests_by_replica": dict(algorithm.requests_by_replica),
    }
