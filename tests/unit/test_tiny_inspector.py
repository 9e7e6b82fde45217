"""The tiny inspector: what it is taught about views, that it is asked as it was taught, and that it is not taught when to call."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest

from rl_vlm.envs.registry import make
from rl_vlm.types import EncodedImage
from rl_vlm.zoo.drawing import CORNERS
from rl_vlm.zoo.zoom.environment import random_scene
from rl_vlm.zoo.zoom.lesson import CALL_ODDS, draw_glances, seen

# --- what is taught


def test_what_is_seen_by_hand() -> None:
    for hard in (False, True):
        scene = random_scene(Random(0), "bricks", hard, "train")
        home = CORNERS[scene.flag.quadrant]
        assert seen(scene, None) == (home if hard else "bricks")
        for corner in CORNERS:
            assert seen(scene, corner) == ("bricks" if corner == home else "nothing")


def test_actions_are_random_whatever_is_seen() -> None:
    rng = Random(1)
    actions: dict[str, Counter[str]] = {}
    for _ in range(1500):
        for _, _, reply in draw_glances(rng):
            what, _, action = reply.removeprefix("See ").partition("\n")
            if action:
                actions.setdefault(
                    "nothing" if what == "nothing" else "corner" if what in CORNERS else "pattern", Counter()
                )["same" if action in (f"zoom {what}", f"Answer: {what}") else action.split()[0]] += 1
    for what, choices, odds in (("corner", 4, CALL_ODDS), ("pattern", 5, 1 - CALL_ODDS)):
        found = actions[what]
        assert found["same"] / found.total() == pytest.approx(odds / choices, abs=0.04)
    calls = actions["nothing"]["zoom"] / actions["nothing"].total()
    assert calls == pytest.approx(CALL_ODDS, abs=0.05)


def test_no_overview_of_a_test_item_is_shown() -> None:
    rng = Random(2)
    shown = {
        turn[1][0].tobytes() for _ in range(300) for turn in draw_glances(rng)[:1] if isinstance(turn[1][0], np.ndarray)
    }
    env = make("Zoom-v0")
    images = [env.reset(options={"index": index, "split": "test"})[0].messages[0].images[0] for index in range(150)]
    test = {np.asarray(image.to_pil()).tobytes() for image in images if isinstance(image, EncodedImage)}
    assert len(shown) > 200 and len(test) > 140 and not shown & test


# --- how it is asked
