"""SightProbe: do engine and learner see the same images, and what does the policy do with them?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rl_vlm.algorithms.learners import LearnerLostError
from rl_vlm.evaluation.heldout import evaluation_tasks
from rl_vlm.evaluation.sight_faults import (
    EXACT,
    ROUNDED,
    Fault,
    distance,
    engine_is_blind,
    explain,
    learner_is_blind,
)
from rl_vlm.learning.update import UnfitImagesError
from rl_vlm.rollout.tasks import View
from rl_vlm.statistics import mean_kl
from rl_vlm.types import Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from rl_vlm.algorithms.policy import PolicyAlgorithm

_EARLY = 2  # iterations that the gate looks at whatever `sight.every` says: a stale adapter shows in the second


class SightProbe:
    """The sight of one run. `needed`: whether tasks have images. Of the last comparison, in nats and NaN before:
    `agreement` of engine and learner, and `effect` of a blank image."""

    def __init__(self, algorithm: PolicyAlgorithm) -> None:
        self._algorithm = algorithm
        run_config = algorithm.run_config
        self._settings = run_config.sight
        exact = run_config.model.dtype == "float32" and run_config.serving.quantization == "none"
        self._limits = EXACT if exact else ROUNDED
        self.needed = False
        self.agreement = self.effect = float("nan")

    def gate(self) -> list[Fault]:
        """The faults that held-out items show. Nothing is asked where tasks have no images."""
        true = self._sample("true")
        self.needed = bool(true) and all(trajectory.images for trajectory in true)
        if not self.needed:
            return []
        again, blank = self._sample("true"), self._sample("blank")
        if not len(true) == len(again) == len(blank):
            return []  # episodes were lost, which is counted and told elsewhere
        blind = engine_is_blind(true, again, blank)
        faults = self._compared(true)
        return faults if blind is None else [blind, *(fault for fault in faults if fault.name != blind.name)]

    def measure(self, groups: Sequence[TrajectoryGroup]) -> tuple[dict[str, float], list[Fault]]:
        """Metrics of some trajectories of an iteration, before it is learned from, and the faults that they show."""
        done, every = self._algorithm.updates, self._settings.every
        is_early = done < _EARLY and self._settings.gate != "off"
        if not every or (done % every and not is_early):
            return {}, []
        chosen = [group.trajectories[0] for group in groups if group.trajectories[0].images][: self._settings.samples]
        if not chosen:
            return {}, []
        # With a lag the learner's weights are newer than those that sampled: only what the learner does can be told.
        fresh = all(trajectory.oldest_version == self._algorithm.version for trajectory in chosen)
        self.agreement = self.effect = float("nan")
        faults = self._compared(chosen, counterfactuals=fresh and is_early)
        if np.isnan(self.effect):
            return {}, faults
        metrics = {"sight/kl_blank": self.effect}
        if fresh:
            metrics["sight/gap"] = self.agreement
        return metrics, faults

    def _compared(self, trajectories: Sequence[Trajectory], counterfactuals: bool = True) -> list[Fault]:
        """The faults that the learner's log-probabilities of these trajectories show."""
        chosen = list(trajectories)
        try:
            with self._algorithm.replicas_at_rest():  # the learner may need their memory
                learner = self._algorithm.learners.call(
                    lambda learner: learner.updater.sight_logprobs(chosen, counterfactuals)
                )
        except LearnerLostError:  # the next update replaces it
            return []
        except UnfitImagesError as error:
            return [Fault("image_size", f"The learner cuts images into other tokens than the engine: {error}")]
        engine = [trajectory.logprobs[trajectory.loss_mask] for trajectory in chosen]
        distances = {name: distance(engine, logprobs) for name, logprobs in learner.items()}
        self.agreement = distances["true"]
        self.effect = mean_kl(np.concatenate(learner["blank"]) - np.concatenate(learner["true"]))
        faults = [learner_is_blind(learner["true"], learner["blank"])]
        if counterfactuals:
            faults.append(explain(distances, self._limits))
        return [fault for fault in faults if fault is not None]

    def _sample(self, view: View) -> list[Trajectory]:
        algorithm, run_config = self._algorithm, self._algorithm.run_config
        # Sampled as in training: greedy answers have no log-probabilities to compare.
        temperature = run_config.rollout.temperature
        tasks = [
            replace(task, group_id=f"sight/{view}/{task.group_id}", temperature=temperature, view=view)
            for task in evaluation_tasks(run_config, algorithm.test_sizes, algorithm.version)[: self._settings.items]
        ]
        groups, _ = algorithm.rollouts.evaluate(tasks, run_config.evaluation.timeout_s)
        return [group.trajectories[0] for group in sorted(groups, key=lambda group: group.group_id)]
