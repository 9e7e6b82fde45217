"""Lessons of the tiny model for Zoom-v0: pictures with a flag, and enlarged parts of them.

Each reply first describes the view rightly: the pattern if it can be read, the flag's corner if the flag is too small,
nothing if there is no flag. A random call or answer follows: reinforcement learning has to find out when to call, for
which part, and what to answer.
"""

from __future__ import annotations

from random import Random

import numpy as np
from PIL import Image

from rl_vlm.zoo.drawing import CORNERS
from rl_vlm.zoo.tiny.teach import Draw, Exchange
from rl_vlm.zoo.zoom.crops import QUADRANTS, cut, overview
from rl_vlm.zoo.zoom.environment import BRIEF
from rl_vlm.zoo.zoom.flags import PATTERNS, FlagScene, random_scene, render_scene

ZOOM = 4  # how much larger the pictures are than what is shown
MAX_TURNS = 3
TASK_SHARE = 0.5  # of the dialogues; the rest ask what there is to see
CALL_ODDS = 0.8  # of a call in place of an answer: calls must not die out before answers are learned
SEEN_QUESTION = "See?"
NOTHING = "nothing"

CORPUS = (
    f"{BRIEF} {SEEN_QUESTION}\n" * 3,
    "See top left\nzoom bottom right\nSee bottom left\nzoom top right\nSee nothing\nzoom bottom left\n" * 3,
    "".join(f"See {pattern}\nAnswer: {pattern}\n" for pattern in PATTERNS) * 3,
)


def draw_glances(rng: Random) -> list[Exchange]:
    """One conversation about a picture of the train split."""
    scene = random_scene(rng, rng.choice(PATTERNS), rng.random() < 0.5, "train")
    picture = Image.fromarray(render_scene(scene, ZOOM))
    corner: str | None = None
    if rng.random() >= TASK_SHARE:
        if rng.random() < 0.6:
            corner = CORNERS[scene.flag.quadrant] if rng.random() < 0.8 else rng.choice(CORNERS)
        return [Exchange("user", (view(picture, corner, scene), SEEN_QUESTION), f"See {seen(scene, corner)}")]
    turns: list[Exchange] = [Exchange("user", (view(picture, None, scene), BRIEF), "")]
    while True:
        called = rng.choice(CORNERS) if rng.random() < CALL_ODDS else None
        action = f"Answer: {rng.choice(PATTERNS)}" if called is None else f"zoom {called}"
        turns[-1] = turns[-1]._replace(reply=f"See {seen(scene, corner)}\n{action}")
        if called is None or len(turns) == MAX_TURNS:
            return turns
        corner = called
        turns.append(Exchange("tool", (view(picture, corner, scene),), ""))


def view(picture: Image.Image, corner: str | None, scene: FlagScene) -> np.ndarray:
    """uint8 [view_size, view_size, 3]: a quarter of the picture, or the whole without a corner."""
    size = scene.view_size
    image = overview(picture, size) if corner is None else cut(picture, QUADRANTS[corner], size)
    return np.asarray(image.to_pil())


def seen(scene: FlagScene, corner: str | None) -> str:
    """What such a view shows of the flag: its pattern, its corner, or nothing."""
    home = CORNERS[scene.flag.quadrant]
    if corner is not None and corner != home:
        return NOTHING
    return home if corner is None and scene.flag.hard else scene.flag.pattern


def drawer(seed: int) -> Draw:
    rng = Random(f"inspector {seed}")
    return lambda: draw_glances(rng)
