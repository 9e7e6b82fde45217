"""Does the policy see? Names the fault that explains what an engine or a learner does with images.

The engine's log-probabilities of what it sampled are compared with the learner's, recomputed as they should be and
under hypotheses of what may have gone wrong: blank images, images in another order, positions without rows, no adapter.
A hypothesis that explains the engine much better than the truth is the fault. This works for any model, engine and
environment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rl_vlm.algorithms.learners import LearnerLostError
from rl_vlm.evaluation.heldout import evaluation_tasks
from rl_vlm.learning.update import UnfitImagesError
from rl_vlm.numerics import mean_kl
from rl_vlm.rollout.tasks import RolloutTask, View
from rl_vlm.types import RLVLMError, Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from rl_vlm.algorithms.policy import PolicyAlgorithm


# Mean distance of log-probabilities (nats per token) that arithmetic alone explains, and from which no hypothesis is
# needed.
EXACT, ROUNDED = (1e-4, 1e-3), (0.1, 0.5)
_BETTER = 3.0  # times closer than the truth must a hypothesis be
_UNCHANGED = 1e-6
# Nats: a token that is likelier than this whatever is shown can hardly change, seen or not. Log-probabilities are known
# to 1e-5.
_SURE = 1e-2

HYPOTHESES: dict[str, tuple[str, str]] = {
    "blank": ("engine_blind", "The engine answers as if images were blank: they get lost on the way to the model."),
    "reversed": ("images_swapped", "The engine sees the images of a prompt in another order."),
    "other": ("images_swapped", "The engine answers about the image of another request."),
    "no_rows": ("positions", "The engine drops the height and width rows of image positions (M-RoPE)."),
    "zero_rows": ("positions", "The engine has zeros in the height and width rows of positions (M-RoPE)."),
    "sequential": ("positions", "The engine counts image tokens one by one, without M-RoPE."),
    "base": ("stale_adapter", "The engine answers with the model without its adapter, or with an older one."),
}


class SightError(RLVLMError):
    """The policy does not see its images, or engine and learner see different ones."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A named fault and a sentence about it; one that does not stop a run says what could not be told."""

    name: str
    message: str
    stops: bool = True


def distance(engine: Sequence[np.ndarray], learner: Sequence[np.ndarray]) -> float:
    """Mean absolute difference of log-probabilities [T] over all tokens, nats."""
    return float(np.mean(np.abs(np.concatenate(list(engine)) - np.concatenate(list(learner)))))


def explain(distances: Mapping[str, float], limits: tuple[float, float]) -> Fault | None:
    """The fault behind the engine's log-probabilities, if there is one.

    `distances`: of the engine's log-probabilities from the learner's, "true" and by hypothesis. `limits`: EXACT or
    ROUNDED.
    """
    true = distances["true"]
    if true <= limits[0]:
        return None
    best = min((name for name in distances if name in HYPOTHESES), key=distances.__getitem__, default=None)
    if best is not None and distances[best] * _BETTER < true:
        name, message = HYPOTHESES[best]
        return Fault(name, f"{message} ({true:.3g} nats per token from the learner, {distances[best]:.3g} if so)")
    if not true <= limits[1]:  # nan too, which no hypothesis explains
        return Fault(
            "disagreement",
            f"Engine and learner give the same tokens log-probabilities that differ by {true:.3g} nats: they see "
            "different images or have different weights.",
        )
    return None


def engine_is_blind(
    true: Sequence[Trajectory], again: Sequence[Trajectory], blank: Sequence[Trajectory]
) -> Fault | None:
    """A fault if the engine answers the same with blank images; `again` repeats `true`, which shows its noise.

    All are sampled with the same seeds, item by item. One that does not stop a run where equal answers are all sure: a
    policy that has converged, or that says one thing only, gives them seeing or not.
    """
    seen = [
        _difference(first, other) > 3 * _difference(first, same) + 1e-5
        for first, same, other in zip(true, again, blank, strict=True)
        if _can_tell(first, other)
    ]
    if not seen:
        return Fault(
            "too_sure",
            "The policy is so sure of its answers, with blank images too, that they cannot tell whether the engine "
            "sees any.",
            stops=False,
        )
    if np.mean(seen) > 0.25:
        return None
    return Fault("engine_blind", "The engine gives the same answers with blank images: it does not see any.")


def learner_is_blind(true: Sequence[np.ndarray], blank: Sequence[np.ndarray]) -> Fault | None:
    """A fault if the learner's log-probabilities [T] are the same with blank images, of tokens of which it is not
    sure."""
    seen, unseen = np.concatenate(list(true)), np.concatenate(list(blank))
    unsure = ~_is_sure(np.minimum(seen, unseen))
    if not unsure.any() or not distance([seen[unsure]], [unseen[unsure]]) <= _UNCHANGED:  # nan says nothing about sight
        return None
    return Fault("learner_blind", "The learner computes the same with blank images: it does not see any.")


def raise_or_tell(faults: Sequence[Fault], mode: str) -> list[str]:
    """The faults as sentences for people. Raises SightError in mode "error" if there are any that stop a run."""
    sentences = [f"{fault.message} [sight: {fault.name}]" for fault in faults]
    if mode == "error" and any(fault.stops for fault in faults):
        raise SightError(" ".join(sentences) + " Set sight.gate to warn to train all the same.")
    return sentences


def _difference(first: Trajectory, other: Trajectory) -> float:
    """How far the first turns of two samples are apart: infinite where their tokens differ, else nats."""
    (ids, logprobs), (other_ids, other_logprobs) = _first_turn(first), _first_turn(other)
    if not np.array_equal(ids, other_ids):
        return float("inf")
    return float(np.abs(logprobs - other_logprobs).max())


def _can_tell(first: Trajectory, other: Trajectory) -> bool:
    """Whether the first turns of two samples differ in their tokens or hold one that is not sure in both."""
    (ids, logprobs), (other_ids, other_logprobs) = _first_turn(first), _first_turn(other)
    return not np.array_equal(ids, other_ids) or not _is_sure(np.minimum(logprobs, other_logprobs)).all()


def _first_turn(trajectory: Trajectory) -> tuple[np.ndarray, np.ndarray]:
    """The first turn's token ids and log-probabilities [T]."""
    span = slice(trajectory.turns[0].start, trajectory.turns[0].stop)
    return trajectory.token_ids[span], trajectory.logprobs[span]


def _is_sure(logprobs: np.ndarray) -> np.ndarray:
    """bool [T]; nan is not sure."""
    return logprobs > -_SURE


_EARLY = 2  # iterations that are measured whatever `sight.every` says: a stale adapter shows in the second


class SightProbe:
    """The sight of one run. `needed` is whether tasks have images; `agreement` the gate's distance in nats, NaN
    before."""

    def __init__(self, algorithm: PolicyAlgorithm) -> None:
        self._algorithm = algorithm
        self._settings = algorithm.run_config.sight
        run_config = algorithm.run_config
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
        if not every or (done % every and done >= _EARLY):
            return {}, []
        chosen = [group.trajectories[0] for group in groups if group.trajectories[0].images][: self._settings.samples]
        if not chosen:
            return {}, []
        # With a lag the learner's weights are newer than those that sampled: only what the learner does can be told.
        fresh = all(trajectory.oldest_version == self._algorithm.version for trajectory in chosen)
        self.agreement = self.effect = float("nan")
        faults = self._compared(chosen, counterfactuals=fresh and done < _EARLY)
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
            learner = self._algorithm.learners.call(lambda one: one.sight_logprobs(chosen, counterfactuals))
        except LearnerLostError:  # the next update replaces it
            return []
        except UnfitImagesError as error:
            return [Fault("image_size", f"The learner cuts images into other tokens than the engine: {error}")]
        engine = [trajectory.logprobs[trajectory.loss_mask] for trajectory in chosen]
        distances = {name: distance(engine, found) for name, found in learner.items()}
        self.agreement = distances["true"]
        self.effect = mean_kl(np.concatenate(learner["blank"]) - np.concatenate(learner["true"]))
        faults = [learner_is_blind(learner["true"], learner["blank"])]
        if counterfactuals:
            faults.append(explain(distances, self._limits))
        return [fault for fault in faults if fault is not None]

    def _sample(self, view: View) -> list[Trajectory]:
        algorithm = self._algorithm
        groups, _ = algorithm.rollouts.evaluate(self._tasks(view), algorithm.run_config.evaluation.timeout_s)
        return [group.trajectories[0] for group in sorted(groups, key=lambda group: group.group_id)]

    def _tasks(self, view: View) -> list[RolloutTask]:
        run_config = self._algorithm.run_config
        tasks = evaluation_tasks(run_config, self._algorithm.test_sizes, self._algorithm.version)
        # Sampled as in training: greedy answers have no log-probabilities to compare.
        return [
            replace(
                task, group_id=f"sight/{view}/{task.group_id}", temperature=run_config.rollout.temperature, view=view
            )
            for task in tasks[: self._settings.items]
        ]
