"""A training run on Ray: starts the cluster, the replicas and the algorithm, and stops them."""

from __future__ import annotations

import os
import sys
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_vlm.config import TrainConfig
from rl_vlm.files import open_own
from rl_vlm.imports import import_meanwhile, imports_done
from rl_vlm.runs.lifecycle import BaseRun

if TYPE_CHECKING:
    from rl_vlm.algorithms.base import RunAlgorithm


class RayRun(BaseRun):
    """A run on Ray, with an algorithm of RLlib."""

    config: TrainConfig
    algorithm: Any = None

    @staticmethod
    @abstractmethod
    def algorithm_class(config: Any) -> type[RunAlgorithm]:
        """The RLlib algorithm, which takes seconds to import."""

    @contextmanager
    def _services(self) -> Iterator[None]:
        serves = self.config.serves
        import_meanwhile("torch", *(("transformers.modeling_utils", "peft") if serves else ()))
        from rl_vlm.runs.ray_session import ray_cluster
        from rl_vlm.serving.service import started_service

        replicas = " the replicas and" if serves else ""
        self.display.message(f"Starting Ray,{replicas} the learner for {self.config.env.title} ...")
        with (
            ray_cluster(self.config),
            self._ray_metrics(),
            started_service(self.config) if serves else nullcontext() as service,
        ):
            imports_done()
            config = self.algorithm_class(self.config).from_run_config(self.config, self.folder, service)
            try:
                with stderr_to(self.folder / "startup.log"):
                    self.algorithm = config.build_algo()
                self.algorithm.stop_requested = lambda: bool(self.stop)
                if self.start_from is not None:
                    self.algorithm.load_checkpoint(str(self.start_from))
                    self.display.message(f"Resumed from {self._unit} {self._position()}.")
                self._started()
                yield
            finally:
                if self.algorithm is not None:
                    self.algorithm.stop()

    def _position(self) -> int:
        return self.algorithm.progress()[0] if self.algorithm is not None else self.start

    def _write_checkpoint(self, folder: Path) -> None:
        self.algorithm.save_checkpoint(str(folder))

    @contextmanager
    def _ray_metrics(self) -> Iterator[None]:
        from rl_vlm.runs.surroundings import joins_cluster

        wanted = self.config.logging.ray_metrics
        if not (joins_cluster() if wanted is None else wanted):
            yield
            return
        from rl_vlm.monitoring.ray_metrics import RunMetrics

        self.recorder.ray = metrics = RunMetrics(self.config, self.folder, self.total)
        metrics.recall(self.recorder.column("reward/mean"), self.recorder.column("mismatch/kl"))
        try:
            yield
        finally:
            metrics.close()

    def _recover(self, error: Exception) -> None:
        """Go on after a learner was lost, with new ones. Raises LearnerDiedError."""
        self.display.message(f"{error} Going on from the newest checkpoint.")
        self.algorithm.recover(error)

    def checkpoint(self) -> None:
        from rl_vlm.algorithms.learners import LearnerLostError  # imports Ray

        try:
            super().checkpoint()
        except LearnerLostError as error:  # the next update replaces it, from the checkpoint before this one
            self.display.message(f"No checkpoint at {self._unit} {self._position()}. {error}")


@contextmanager
def stderr_to(path: Path) -> Iterator[None]:
    """Redirect stderr to a file: Ray and RLlib write messages about internals while they start."""
    with open_own(path) as file:
        sys.stderr.flush()
        saved = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
