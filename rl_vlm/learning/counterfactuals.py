"""Counterfactuals: log-probabilities that a learner computes when it sees other images or positions, or runs without its adapter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeAlias

import numpy as np

from rl_vlm.envs.images import blanked, resized
from rl_vlm.learning.batching import MicroBatch
from rl_vlm.learning.update import PositionChange
from rl_vlm.models.loading import TextSide
from rl_vlm.types import EncodedImage, RLVLMError, Trajectory

ImagesChange: TypeAlias = Callable[[Sequence[EncodedImage]], tuple[EncodedImage, ...]]


class Recompute(Protocol):
    """`PolicyUpdater.recompute`."""

    def __call__(
        self, trajectories: Sequence[Trajectory], change: PositionChange | None = None, *, adapter: bool = True
    ) -> list[np.ndarray]:
        """Log-probabilities float32 [sampled tokens] of each trajectory."""
        ...


class UnfitImagesError(RLVLMError):
    """The learner makes another number of tokens of an image than the engine did."""


def sight_logprobs(
    trajectories: Sequence[Trajectory], recompute: Recompute, text: TextSide, counterfactuals: bool = True
) -> dict[str, list[np.ndarray]]:
    """Log-probabilities float32 [T] of the sampled tokens of each trajectory, "true", "blank" and by counterfactual.

    The names are those of evaluation/sight_faults.py; one that changes nothing is left out. Raises UnfitImagesError.
    """
    _check_tokens(trajectories, text)
    logprobs = {"true": recompute(trajectories), "blank": recompute(_with_images(trajectories, blanked))}
    if not counterfactuals:
        return logprobs
    if any(len(trajectory.images) > 1 for trajectory in trajectories):
        logprobs["reversed"] = recompute(_with_images(trajectories, _reversed))
    if len(trajectories) > 1:
        logprobs["other"] = recompute(_exchanged(trajectories))
    for name, change in (("no_rows", _without_rows), ("zero_rows", _zero_rows), ("sequential", _sequential)):
        logprobs[name] = recompute(trajectories, change)
    logprobs["base"] = recompute(trajectories, adapter=False)
    return logprobs


def _check_tokens(trajectories: Sequence[Trajectory], text: TextSide) -> None:
    for trajectory in trajectories:
        wanted = sum(text.count_image_tokens(image.width, image.height) for image in trajectory.images)
        there = int((trajectory.token_ids == text.codec.image_token_id).sum())
        if wanted != there:
            raise UnfitImagesError(
                f"{trajectory.trajectory_id} has {there} image tokens, and the learner makes {wanted} of its images."
            )


def _with_images(trajectories: Sequence[Trajectory], change: ImagesChange) -> list[Trajectory]:
    return [replace(trajectory, images=change(trajectory.images)) for trajectory in trajectories]


def _reversed(images: Sequence[EncodedImage]) -> tuple[EncodedImage, ...]:
    return tuple(resized(there, own.width, own.height) for there, own in zip(reversed(images), images, strict=True))


def _exchanged(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Each trajectory with the images of its neighbour: 0 with those of 1 and the other way round, 2 and 3, ..."""
    changed = []
    for number, own in enumerate(trajectories):
        partner = trajectories[number ^ 1] if number ^ 1 < len(trajectories) else trajectories[0]
        pairs = zip(own.images, partner.images, strict=False)
        images = [resized(there, here.width, here.height) for here, there in pairs]
        changed.append(replace(own, images=(*images, *own.images[len(images) :])))
    return changed


def _without_rows(micro: MicroBatch) -> np.ndarray:
    return np.stack([micro.position_ids[0]] * 3)


def _zero_rows(micro: MicroBatch) -> np.ndarray:
    """Only in the first prompt: engines count on from there by themselves."""
    rows = np.where(micro.segments == 0, 0, micro.position_ids[1:])
    return np.concatenate([micro.position_ids[:1], rows])


def _sequential(micro: MicroBatch) -> np.ndarray:
    shape = micro.position_ids.shape
    return np.broadcast_to(np.arange(shape[-1]), shape).copy()
