"""The variants of the tiny model: what each is taught, for how long, and where its shape differs."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from rl_vlm.types import UserInputError


@dataclass(frozen=True, slots=True)
class Variant:
    """One variant.

    lesson: the module below `rl_vlm.zoo` with its lessons (see `zoo/tiny/teach.py`). steps, batch: optimiser steps of
    the warm start, and conversations per step. version: of the lessons; raise it whenever the weights would come out
    differently (None: counted by RECIPE_VERSION alone). rise: steps until the full learning rate. test: the module's
    function that says whether a model has learned the lessons; if not, they are repeated, at most twice. wide: heads of
    32 dimensions instead of 16, the fewest that vLLM's kernels support. layers, hidden: of the language model. smol:
    SmolVLM's form (`zoo/tiny/smol.py`) in place of Qwen's. vocabulary: ids of the tokenizer but for added tokens.
    rate, buckets: see `teach`. copies: it begins as `zoo/tiny/copying.py` says. shipped: seed 0 comes with the package.
    """

    lesson: str
    steps: int
    batch: int
    version: int | None = None
    rise: int = 20
    test: str = ""
    wide: bool = False
    layers: int = 2
    smol: bool = False
    hidden: int = 64
    vocabulary: int = 464
    rate: float = 3e-3
    buckets: tuple[int, ...] = (32, 64)
    copies: bool = False
    shipped: bool = False

    @property
    def lessons(self) -> Any:
        """The module with the lessons. Importing it imports the environment that they belong to."""
        return importlib.import_module(f"rl_vlm.zoo.{self.lesson}")

    @property
    def corpus(self) -> tuple[str, ...]:
        return tuple(self.lessons.CORPUS)

    def passes(self, model: Any, encoder: Any) -> bool:
        return not self.test or bool(getattr(self.lessons, self.test)(model, encoder))


VARIANTS = {
    # The shapes of Shapes-v0.
    "small": Variant("shapes.lesson", 450, 64, rise=1, shipped=True),
    # To answer as a prompt asks: for environments of one's own.
    "words": Variant(
        "words.lesson", 4000, 48, version=1, rise=100, wide=True, layers=3, hidden=96, vocabulary=3072, rate=1e-3,
        buckets=(32, 64, 96, 128), copies=True, shipped=True,
    ),
    "wide": Variant("shapes.lesson", 450, 64, rise=1, wide=True),
    "smol": Variant("shapes.lesson", 600, 24, version=1, smol=True),
    # Pictures of poles, which it compares.
    "labeller": Variant("poles.lesson", 600, 24, version=3, rise=50, test="can_compare", wide=True),
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
    # As scenes, and which of two captions describes a picture better. It reads two captions, compares each with the
    # picture, and then both: two layers are too few.
    "judge": Variant("caption.lesson", 1200, 32, version=1, layers=4),
}  # fmt: skip


def variant_named(name: str) -> Variant:
    if name not in VARIANTS:
        raise UserInputError(f"Tiny model variant {name!r} is unknown; choose one of {', '.join(VARIANTS)}.")
    return VARIANTS[name]
