"""SightProbe: do engine and learner see the same images, and what does the policy do with them?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from rl_vlm.config import PolicyConfig
from rl_vlm.evaluation.sight_faults import EXACT, ROUNDED, Fault, distance, engine_is_blind, explain, learner_is_blind
from rl_vlm.learning.sight_check import UnfitImagesError
from rl_vlm.rollout.tasks import View
from rl_vlm.statistics import mean_kl
from rl_vlm.types import Trajectory, TrajectoryGroup

_EARLY = 2  # iterations that the gate looks at whatever `sight.every` says: a stale adapter shows in the second

# The learner's `sight_logprobs` of trajectories, with counterfactuals or without.
LearnerLogprobs: TypeAlias = Callable[[Sequence[Trajectory], bool], dict[str, list[np.ndarray]]]


class SightProbe:
    """The sight of one run. `sample` plays some held-out items under a view, as in training.

    `needed`: whether tasks have images. Of the last comparison, in nats and NaN before: `agreement` of engine and
    learner, and `effect` of a blank image.
    """

    def __init__(
        self, run: PolicyConfig, learner_logprobs: LearnerLogprobs, sample: Callable[[View], list[Trajectory]]
    ) -> None:
        self._settings, self._learner_logprobs, self._sample = run.sight, learner_logprobs, sample
        exact = run.model.dtype == "float32" and run.serving.quantization == "none"
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
            return []  # episodes were lost, which is counted and reported elsewhere
        blind = engine_is_blind(true, again, blank)
        faults = self._compared(true)
        return faults if blind is None else [blind, *(fault for fault in faults if fault.name != blind.name)]

    def measure(
        self, groups: Sequence[TrajectoryGroup], version: int, done: int
    ) -> tuple[dict[str, float], list[Fault]]:
        """Metrics of some trajectories, before the learner of that version learns from them after `done` iterations,
        and the faults that they show."""
        every = self._settings.every
        is_early = done < _EARLY and self._settings.gate != "off"
        if not every or (done % every and not is_early):
            return {}, []
        chosen = [group.trajectories[0] for group in groups if group.trajectories[0].images][: self._settings.samples]
        if not chosen:
            return {}, []
        # With a lag the learner's weights are newer than those of the samples, so only the learner can be judged.
        fresh = all(trajectory.oldest_version == version for trajectory in chosen)
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
        try:
            learner = self._learner_logprobs(trajectories, counterfactuals)
        except UnfitImagesError as error:
            return [Fault("image_size", f"The learner cuts images into other tokens than the engine: {error}")]
        engine = [trajectory.logprobs[trajectory.loss_mask] for trajectory in trajectories]
        # What comes before the first image, such as a call of the tool that shows one, says nothing about sight.
        shown = learner.pop("shown")
        after = {
            name: [one[mask] for one, mask in zip(learner[name], shown, strict=True)] for name in ("true", "blank")
        }
        distances = {name: distance(engine, logprobs) for name, logprobs in learner.items()}
        self.agreement = distances["true"]
        self.effect = mean_kl(np.concatenate(learner["blank"]) - np.concatenate(learner["true"]))
        faults = [learner_is_blind(after["true"], after["blank"])]
        if counterfactuals:
            faults.append(explain(distances, self._limits))
        return [fault for fault in faults if fault is not None]
