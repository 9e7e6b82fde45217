"""The pictures of segments: as a labeller sees them, and as PNG."""

from __future__ import annotations

import numpy as np
from PIL import Image

from rl_vlm.labelling.types import Segment
from rl_vlm.types import EncodedImage, UserInputError


def picture_of(segment: Segment, frames: int = 1) -> np.ndarray:
    """uint8 [H, frames × W, 3]: `frames` pictures of the segment side by side, evenly spaced, the last of them its last.

    Raises UserInputError if the segment has no pictures.
    """
    if segment.frames is None:
        raise UserInputError("These segments have no pictures: give the environment a camera or a render function.")
    steps = len(segment)
    places = [max(steps - 1 - back * (steps // frames), 0) for back in reversed(range(frames))]
    return np.concatenate([segment.frames[place] for place in places], axis=1)


def encode(picture: np.ndarray) -> EncodedImage:
    """The PNG of a picture uint8 [H, W, 3] and its hash, for a labeller and for the label store."""
    return EncodedImage.from_pil(Image.fromarray(picture))
