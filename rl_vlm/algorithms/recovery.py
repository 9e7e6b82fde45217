"""Recovery: what a checkpoint of a policy run holds, and the way back to one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rl_vlm.algorithms.checkpoint import Checkpoint, read_checkpoint
from rl_vlm.models.weights import WeightPayload

if TYPE_CHECKING:
    from rl_vlm.algorithms.policy import PolicyAlgorithm


class Recovery:
    """Takes and restores checkpoints of one algorithm. `last_checkpoint` is the one that new learners start from."""

    def __init__(self, algorithm: PolicyAlgorithm) -> None:
        self._algorithm = algorithm
        self._beginning = algorithm.state()
        self.last_checkpoint: Path | None = None
        self.earlier_restarts = 0  # of env runners, in processes before this one

    def checkpoint(self) -> Checkpoint:
        """Everything that an exact resume needs. Raises LearnerLostError."""
        algorithm, version = self._algorithm, self._algorithm.version
        adapter, moments, extras, random = algorithm.learners.call(lambda learner: learner.snapshot(version))
        state = {**algorithm.state(), "torch_rng": random.tolist(), "restarts": dict(algorithm.restarts)}
        return Checkpoint(adapter, moments, state, extras)

    def load(self, checkpoint: Checkpoint, *, new_process: bool) -> None:
        """Go on from a checkpoint; a new process also continues with its counts."""
        algorithm, state = self._algorithm, checkpoint.state
        random = torch.tensor(state["torch_rng"], dtype=torch.uint8)
        saved = checkpoint.adapter, checkpoint.moments, checkpoint.extras, random
        algorithm.learners.call_each(lambda learner: learner.restore(*saved))
        algorithm.set_state(state)
        newest = max(algorithm.version, algorithm.service.newest_version())
        fresh = new_process and newest <= algorithm.first_version
        algorithm.rollouts.restore(state["rollouts"], counts=fresh)
        if not fresh:
            self.publish_restored(checkpoint.adapter)
            return
        algorithm.restarts.clear()
        algorithm.restarts.update(state["restarts"])
        self.earlier_restarts = algorithm.restarts["env_runner"]
        algorithm.publish(checkpoint.adapter)

    def restore_learners(self) -> None:
        """Give new learners the last checkpoint, or the beginning; the iterations since then are done again."""
        algorithm = self._algorithm
        lost = algorithm.updates
        if self.last_checkpoint is not None:
            self.load(read_checkpoint(self.last_checkpoint), new_process=False)
        else:
            algorithm.set_state(self._beginning)
            algorithm.rollouts.restore(self._beginning["rollouts"], counts=False)
            version = algorithm.version
            self.publish_restored(algorithm.learners.call(lambda learner: learner.policy.payload(version)))
        algorithm.rollouts.dropped["iterations_repeated"] += lost - algorithm.updates
        algorithm.updates -= 1  # `training_step` counts this iteration, in which nothing was learned

    def replace_lost_learners(self, error: Exception) -> None:
        """Between two iterations: new learners in place of those of which one is lost. Raises LearnerDiedError."""
        self._algorithm.learners.replace(error)
        self._algorithm.updates += 1  # no iteration is under way that would count

    def publish_restored(self, adapter: WeightPayload) -> None:
        """Publish old weights under a new version: versions only grow, and one version never has two contents."""
        algorithm = self._algorithm
        newest = max(algorithm.service.newest_version(), algorithm.version)
        algorithm.publish(replace(adapter, version=newest + 1))
