"""Whether the labels of another run fit this one: the length of its segments, and what the reward model sees of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rl_vlm.config import PreferenceSection
from rl_vlm.labelling.store import LabelStore
from rl_vlm.labelling.types import Segment, SegmentPair
from rl_vlm.types import UserInputError


def check_cache(folder: Path, settings: PreferenceSection, sizes: tuple[int, int]) -> None:
    """Check the first pair of every session of a label cache; `sizes` are those of observation and action.

    Raises UserInputError: at the first labelling session the environment steps before it would be lost.
    """
    store = LabelStore(folder)
    for number in range(1, len(store) + 1):
        pair = store.example(number)
        if pair is not None:
            check_length([pair], settings.segment_length)
            _check_inputs(pair.first, settings, sizes)


def check_length(pairs: Sequence[SegmentPair], wanted: int) -> None:
    """Raise UserInputError unless all segments have the wanted steps."""
    for length in {len(segment) for pair in pairs for segment in (pair.first, pair.second)} - {wanted}:
        raise UserInputError(
            f"The label cache has segments of {length} steps, and preference.segment_length is {wanted}: set it to {length}, "
            "or leave preference.labels.cache out."
        )


def _check_inputs(segment: Segment, settings: PreferenceSection, sizes: tuple[int, int]) -> None:
    if not settings.rewards_images:
        size = segment.observations.shape[1] + segment.actions.shape[1]
        if size != sum(sizes):
            raise UserInputError(
                f"The label cache has states and actions of {size} numbers together, and those of env.id have {sum(sizes)}: give the "
                "cache of a run in this environment, or leave preference.labels.cache out."
            )
        return
    architecture, stride = settings.reward_model.architecture, settings.reward_model.stride
    if segment.frames is None:
        raise UserInputError(
            f"The label cache has no pictures, and preference.reward_model.architecture {architecture} learns from them: set it to mlp, "
            "or leave preference.labels.cache out."
        )
    height, width = segment.frames.shape[1:3]
    # The reward model also takes pictures that its stride has thinned out already.
    seen = -(-settings.image_size // stride)
    if any((-(-height // step), -(-width // step)) == (seen, seen) for step in (1, stride)):
        return
    remedy = f"set it to {height}" if height == width else "give the cache of a run with this one"
    raise UserInputError(
        f"The label cache has pictures of {height} × {width} pixels, and preference.image_size is {settings.image_size}: {remedy}, or "
        "leave preference.labels.cache out."
    )
