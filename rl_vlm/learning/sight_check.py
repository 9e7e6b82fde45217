"""What the learner's log-probabilities would be if engine or learner handled images wrongly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from rl_vlm.envs.images import blanked, resized
from rl_vlm.learning.batching import MicroBatch
from rl_vlm.models.images import ImageLayout
from rl_vlm.types import EncodedImage, RLVLMError, Trajectory

PositionChange = Callable[[MicroBatch], np.ndarray]
Recompute = Callable[..., list[np.ndarray]]  # PolicyUpdater.recompute

_ROWS_AND_COLUMNS = np.array([False, True, True])[:, None, None]  # of positions, whose first axis is time
# Image positions that a faulty engine may have computed where positions have axes.
_OTHER_POSITIONS: dict[str, PositionChange] = {
    "no_rows": lambda micro: np.stack([micro.position_ids[0]] * 3),
    # Only in the first prompt: engines count on from there by themselves.
    "zero_rows": lambda micro: np.where((micro.segments == 0) & _ROWS_AND_COLUMNS, 0, micro.position_ids),
    "sequential": lambda micro: np.zeros_like(micro.position_ids) + np.arange(micro.position_ids.shape[-1]),
}


class UnfitImagesError(RLVLMError):
    """The learner makes another number of tokens of an image than the engine did.

    Do: use one version of transformers and of the model on all machines.
    """


def sight_logprobs(
    recompute: Recompute, images: ImageLayout, trajectories: Sequence[Trajectory], counterfactuals: bool = True
) -> dict[str, list[np.ndarray]]:
    """Log-probabilities float32 [T] of each trajectory's sampled tokens by the names of evaluation/sight_faults.py:
    "true", "blank", and counterfactuals with other images or positions or without the adapter, as far as they change
    something; and "shown", bool [T]: which of these tokens an image precedes. `recompute` is
    `PolicyUpdater.recompute`. Raises UnfitImagesError."""
    for one in trajectories:
        wanted = sum(images.num_features(image.width, image.height) for image in one.placed_images)
        found = int((one.token_ids == images.image_token_id).sum())
        if wanted != found:
            raise UnfitImagesError(
                f"{one.trajectory_id} has {found} image tokens, and the learner makes {wanted} of its images."
            )
    blank = [replace(one, images=blanked(one.images)) for one in trajectories]
    logprobs = {"true": recompute(trajectories), "blank": recompute(blank)}
    begun = [np.logical_or.accumulate(one.token_ids == images.image_token_id) for one in trajectories]
    logprobs["shown"] = [places[one.loss_mask] for places, one in zip(begun, trajectories, strict=True)]
    if not counterfactuals:
        return logprobs
    if any(len(one.images) > 1 for one in trajectories):
        logprobs["reversed"] = recompute([_with_images(one, one.images[::-1]) for one in trajectories])
    if len(trajectories) > 1:
        # Those of its neighbour: 0 with those of 1 and the other way round, 2 and 3, ...
        partners = [trajectories[k ^ 1 if k ^ 1 < len(trajectories) else 0] for k in range(len(trajectories))]
        pairs = zip(trajectories, partners, strict=True)
        logprobs["other"] = recompute([_with_images(one, partner.images) for one, partner in pairs])
    changes = dict(_OTHER_POSITIONS) if images.axes > 1 else {}
    changes["one_place"] = lambda micro: _one_place(micro, images.image_token_id)
    for name, change in changes.items():
        logprobs[name] = recompute(trajectories, change)
    logprobs["base"] = recompute(trajectories, adapter=False)
    return logprobs


def _one_place(micro: MicroBatch, image_token_id: int) -> np.ndarray:
    """As if all tokens of an image that stand together had one position."""
    is_image = micro.input_ids == image_token_id
    later = is_image & np.pad(is_image, ((0, 0), (1, 0)))[:, :-1]
    return np.stack([np.cumsum(~later, axis=1) - 1] * len(micro.position_ids))


def _with_images(own: Trajectory, others: Sequence[EncodedImage]) -> Trajectory:
    """The trajectory with these images, as far as there are some, in place of its own, each as large as that."""
    images = [resized(other, here.width, here.height) for here, other in zip(own.images, others, strict=False)]
    return replace(own, images=(*images, *own.images[len(images) :]))
