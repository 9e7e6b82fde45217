"""What many episodes were shown is sent and held once."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
from core_support import conversation, text_side
from PIL import Image

from rl_vlm.rollout.env_runner import share_images
from rl_vlm.types import EncodedImage, TrajectoryGroup


def test_equal_images_travel_once(tiny_folder: Path) -> None:
    text, rng = text_side(tiny_folder), np.random.default_rng(0)
    pixels = [rng.integers(0, 256, (64, 64, 3), dtype=np.uint8) for _ in range(3)]

    def shown(number: int) -> EncodedImage:  # each environment draws its own
        return EncodedImage.from_pil(Image.fromarray(pixels[number]))

    groups = []
    for number in range(2):
        members = [
            conversation(text, rng, [shown(number), "Where?"], [3, 3], [[shown(2), "And now?"]], name=f"{number}:{k}")
            for k in range(4)
        ]
        groups.append(TrajectoryGroup(str(number), number, members))
    hashes = [[image.sha256 for image in one.images] for group in groups for one in group.trajectories]
    before = len(pickle.dumps(groups))
    share_images(groups)
    found = pickle.loads(pickle.dumps(groups))
    assert [[image.sha256 for image in one.images] for group in found for one in group.trajectories] == hashes
    assert len({id(image) for group in found for one in group.trajectories for image in one.images}) == 3
    each = len(shown(0).png)
    assert before - len(pickle.dumps(groups)) > 0.9 * (16 - 3) * each
