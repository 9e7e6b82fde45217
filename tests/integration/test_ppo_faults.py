"""A PPO learner that is killed at any point, or silent, is replaced, and the run ends as it would have ended without."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_determinism import PPO, build, run_config, same

from rl_vlm.algorithms.checkpoint import write_checkpoint
from rl_vlm.algorithms.learners import LearnerLostError, on_one_learner
from rl_vlm.learning.plan import ScoreBatch
from rl_vlm.runs.ray_session import ray_cluster

POINTS = ["sampling", "score", "between score and update", "update", "checkpoint"]


class Killer:
    """Kills or stops the learner once, at a point of the next iteration."""

    def __init__(self, algorithm: Any, how: signal.Signals = signal.SIGKILL) -> None:
        self.algorithm, self.how = algorithm, how
        self.point = ""
        self._update, self._sample = algorithm.learners.update, algorithm.rollouts.next_groups
        algorithm.learners.update, algorithm.rollouts.next_groups = self._update_learners, self._next_groups

    def kill(self) -> None:
        self.point = ""
        os.kill(on_one_learner(self.algorithm.learner_group, lambda _: os.getpid()), self.how)

    def _next_groups(self, *arguments: Any) -> Any:
        if self.point == "sampling":
            self.kill()
        return self._sample(*arguments)

    def _update_learners(self, batches: list[Any]) -> Any:
        scores = isinstance(batches[0], ScoreBatch)
        if self.point == ("score" if scores else "update"):
            pid = on_one_learner(self.algorithm.learner_group, lambda _: os.getpid())
            self.point = ""
            threading.Timer(0.05, os.kill, (pid, self.how)).start()
        answers = self._update(batches)
        if scores and self.point == "between score and update":
            self.kill()
        return answers


def train_to(algorithm: Any, updates: int, most: int = 12) -> None:
    for _ in range(most):
        if algorithm.updates >= updates:
            return
        algorithm.train()
    raise AssertionError(f"{algorithm.updates} updates after {most} iterations")


@contextmanager
def trained(tiny_folder: Path, folder: Path, *settings: str) -> Iterator[tuple[Any, Path]]:
    """An algorithm with one learner actor after two updates, and its checkpoint."""
    run = run_config(tiny_folder, *PPO, "learner.num_learners=1", "resources.num_cpus=4", *settings)
    with ray_cluster(run):
        algorithm = build(run, folder / "run")
        try:
            train_to(algorithm, 2)
            saved = folder / "checkpoint"
            saved.mkdir(parents=True)
            write_checkpoint(saved, algorithm.recovery.checkpoint())
            yield algorithm, saved
        finally:
            algorithm.stop()


@pytest.mark.acceptance
@pytest.mark.timeout(1200)
def test_a_learner_that_is_killed_at_any_of_five_points_changes_nothing(tiny_folder: Path, tmp_path: Path) -> None:
    with trained(tiny_folder, tmp_path, "learner.max_restarts=9") as (algorithm, saved):
        train_to(algorithm, 4)
        straight = algorithm.recovery.checkpoint()
        killer = Killer(algorithm)
        restarts: Callable[[], int] = lambda: algorithm.restarts["learner"]  # noqa: E731
        for point in POINTS:
            algorithm.load_checkpoint(str(saved))
            before = restarts()
            if point == "checkpoint":
                train_to(algorithm, 3)
                killer.kill()
                with pytest.raises(LearnerLostError):
                    algorithm.recovery.checkpoint()
            else:
                killer.point = point
            train_to(algorithm, 4)
            assert restarts() == before + 1, point
            same(algorithm.recovery.checkpoint(), straight, counts=False)


@pytest.mark.acceptance
@pytest.mark.timeout(600)
def test_a_learner_that_is_silent_is_replaced(tiny_folder: Path, tmp_path: Path) -> None:
    """As one whose node was cut off: its answer is lost, and nobody says that it died."""
    with trained(tiny_folder, tmp_path, "learner.update_timeout_s=20") as (algorithm, _):
        Killer(algorithm, signal.SIGSTOP).point = "update"
        train_to(algorithm, 4)
        assert algorithm.restarts["learner"] == 1
