"""The variants of the tiny model: one row per variant says what it is taught, for how long, and where its shape differs."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from rl_vlm.types import UserInputError
from rl_vlm.zoo.scenes import lesson as scenes
from rl_vlm.zoo.shapes.lesson import perception_dialogue, target_dialogue
from rl_vlm.zoo.tiny.teach import Draw, Turns
from rl_vlm.zoo.zoom import lesson as zoom

# Lessons of the tiny model for mixtures of environments: those of three tiny models, mixed.

# Of the dialogues; the rest are glances. Counting in two pictures takes longest to learn.
SHAPES_SHARE, SCENES_SHARE = 0.22, 0.53
TARGET_SHARE = 0.38  # of the dialogues about shapes
CORPUS = (*scenes.CORPUS, *zoom.CORPUS)


def drawer(seed: int) -> Draw:
    """A function that draws conversations for one warm start."""
    rng, numbers = Random(f"allrounder {seed}"), np.random.default_rng([seed, 8])

    def draw() -> Turns:
        kind = rng.random()
        if kind < SHAPES_SHARE:
            dialogue = target_dialogue if numbers.random() < TARGET_SHARE else perception_dialogue
            return dialogue(numbers).turns
        if kind < SHAPES_SHARE + SCENES_SHARE:
            return [("user", *scenes.draw_lesson(rng))]
        return zoom.draw_glances(rng)

    return draw


@dataclass(frozen=True, slots=True)
class Variant:
    """One variant.

    Args:
        lesson: the module below `rl_vlm.zoo` with its lessons (see `zoo/tiny/teach.py`).
        steps, batch: optimiser steps of the warm start, and conversations per step.
        version: of the lessons, part of the cache key: raise it whenever the weights would come out differently. None: counted by
            RECIPE_VERSION alone.
        rise: steps until the full learning rate.
        test: "module:function" below `rl_vlm.zoo`, which says whether a model with its encoder has learned the lessons. Where it has
            not, the lessons are repeated, at most twice.
        wide: attention heads of 32 dimensions instead of 16, the fewest that vLLM's kernels support.
        layers: of the language model.
    """

    lesson: str
    steps: int
    batch: int
    version: int | None = None
    rise: int = 20
    test: str = ""
    wide: bool = False
    layers: int = 2

    @property
    def lessons(self) -> Any:
        """The module with the lessons. Importing it imports the environment that they belong to."""
        return importlib.import_module(f"rl_vlm.zoo.{self.lesson}")

    @property
    def corpus(self) -> tuple[str, ...]:
        """The texts whose words become single tokens."""
        texts = self.lessons.CORPUS
        return tuple(texts() if callable(texts) else texts)

    def passes(self, model: Any, encoder: Any) -> bool:
        """Whether the model has learned the lessons, as far as there is a test of it."""
        module, _, name = self.test.partition(":")
        return not self.test or bool(getattr(importlib.import_module(f"rl_vlm.zoo.{module}"), name)(model, encoder))


VARIANTS = {
    # The shapes of Shapes-v0.
    "small": Variant("shapes.lesson", 450, 64, rise=1),
    "wide": Variant("shapes.lesson", 450, 64, rise=1, wide=True),
    # Pictures of poles, which it compares. A few seeds need further rounds to learn that.
    "labeller": Variant("poles.lesson", 600, 64, version=2, test="poles.labeller:can_compare", wide=True),
    # What is where on 3×3 and 4×4 grids of GridWalk-v0.
    "gridwalk": Variant("gridwalk.lesson", 700, 40, version=3),
    # Where the pin is on the maps of GeoSpot-v0.
    "geospot": Variant("geospot.lesson", 400, 48, version=1),
    # What the pictures of NLVR2-v0 and Caption-v0 hold.
    "scenes": Variant("scenes.lesson", 700, 48, version=3),
    # The numbers in the triangles that Geo3k-v0 draws.
    "geo3k": Variant("geo3k.lesson", 400, 48, version=1),
    # What the views of Zoom-v0 show.
    "zoom": Variant("zoom.lesson", 250, 48, version=1),
    # Where agent and goal of MiniGrid's empty rooms are.
    "minigrid": Variant("control.lesson", 600, 48, version=1),
    # What small, scenes and zoom know, for runs that train in several environments at once.
    "mixture": Variant("tiny.mixture", 1100, 48, version=1),
    # As scenes, and which of two captions describes a picture better. It reads two captions, compares each with the picture, and then
    # both: two layers are too few.
    "judge": Variant("caption.lesson", 1200, 32, version=1, layers=4),
}


def variant_named(name: str) -> Variant:
    """Raises UserInputError for an unknown name."""
    if name not in VARIANTS:
        raise UserInputError(f"Tiny model variant {name!r} is unknown; choose one of {', '.join(VARIANTS)}.")
    return VARIANTS[name]
