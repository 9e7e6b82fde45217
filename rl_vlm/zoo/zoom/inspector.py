"""The tiny inspector's warm start: it learns what a view shows and the form of calls and answers, not when to call or what to answer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
from PIL import Image

from rl_vlm.models.supervised import DialogueEncoder
from rl_vlm.zoo.shapes.data import CORNERS
from rl_vlm.zoo.tiny.replies import greedily_right, option_odds
from rl_vlm.zoo.tiny.warmstart import teach_drawn
from rl_vlm.zoo.zoom.data import PATTERNS, FlagScene, flag_item, render_scene
from rl_vlm.zoo.zoom.environment import BRIEF
from rl_vlm.zoo.zoom.lesson import SEEN_QUESTION, ZOOM, draw_glances, seen, view

STEPS = 250
BATCH = 48

logger = logging.getLogger(__name__)


def warm_start(model: Any, encoder: DialogueEncoder, seed: int, steps: int = STEPS, batch: int = BATCH) -> float:
    """Train all weights in place on random glances; returns the last loss (nats per token)."""
    rng = Random(f"inspector {seed}")
    return teach_drawn(model, encoder, lambda: encoder.encode_chat(draw_glances(rng)), steps, batch, "tiny inspector:")


def perception_accuracy(model: Any, encoder: DialogueEncoder, scenes: Sequence[FlagScene], enlarged: bool) -> float:
    """How often the likeliest reply to what there is to see is right, in overviews or in enlarged quarters with the flag."""
    corners = [CORNERS[scene.flag.quadrant] if enlarged else None for scene in scenes]
    prompts = [
        (view(Image.fromarray(render_scene(scene, ZOOM)), corner, scene), SEEN_QUESTION)
        for scene, corner in zip(scenes, corners, strict=True)
    ]
    answers = [f"See {seen(scene, corner)}" for scene, corner in zip(scenes, corners, strict=True)]
    return float(greedily_right(model, encoder, prompts, answers).mean())


def action_odds(model: Any, encoder: DialogueEncoder, scenes: Sequence[FlagScene]) -> np.ndarray:
    """float32 [N, 9]: how likely each call (in the order of CORNERS) and each answer (of PATTERNS) is to an overview, once what it
    shows is rightly written down.
    """
    actions = [*(f"zoom {corner}" for corner in CORNERS), *(f"Answer: {pattern}" for pattern in PATTERNS)]
    prompts = [(view(Image.fromarray(render_scene(scene, ZOOM)), None, scene), BRIEF) for scene in scenes]
    replies = [[f"See {seen(scene, None)}\n{action}" for action in actions] for scene in scenes]
    return option_odds(model, encoder, prompts, replies)[0]


def log_accuracy(model: Any, encoder: DialogueEncoder, loss: float, seconds: float) -> None:
    """Log how often the model is right about what a view shows, and how likely the right action is, which should be chance."""
    scenes = [flag_item("test", index) for index in range(200)]
    odds = action_odds(model, encoder, scenes)
    good = [
        scene.flag.quadrant if scene.flag.hard else len(CORNERS) + PATTERNS.index(scene.flag.pattern)
        for scene in scenes
    ]
    overviews, parts = (perception_accuracy(model, encoder, scenes, enlarged) for enlarged in (False, True))
    logger.info(
        "tiny inspector: done in %.0f s, loss %.3f; right about overviews %.2f, about parts %.2f; the good action %.2f (chance 0.11)",
        seconds, loss, overviews, parts, odds[np.arange(len(scenes)), good].mean(),
    )  # fmt: skip
