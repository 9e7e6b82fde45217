"""The variants of the tiny model: what each was taught, where its lessons are, and where its shape differs."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from rl_vlm.types import UserInputError


@dataclass(frozen=True, slots=True)
class Variant:
    """One variant.

    knows: for people. lessons: its module, with STEPS, `warm_start` and `log_accuracy`. words: the modules whose CORPUS (texts, or a function
    that gives them) holds the words that become single tokens. version: of the lessons, part of the cache key: raise it whenever the
    weights would come out differently; None for those that RECIPE_VERSION alone counts. wide: heads of 32 dimensions instead of 16, the
    least that vLLM's kernels support. layers: of the language model.
    """

    knows: str
    lessons: str = "tiny.warmstart"
    words: tuple[str, ...] = ()
    version: int | None = None
    wide: bool = False
    layers: int = 2

    @property
    def module(self) -> Any:
        """Its lessons. Imports torch and the environments of the warm start."""
        return importlib.import_module(f"rl_vlm.zoo.{self.lessons}")

    @property
    def corpus(self) -> tuple[str, ...]:
        """The text whose words become tokens."""
        corpora = [importlib.import_module(f"rl_vlm.zoo.{name}").CORPUS for name in self.words]
        return tuple(text for corpus in corpora for text in (corpus() if callable(corpus) else corpus))


VARIANTS = {
    "small": Variant("the shapes of Shapes-v0"),
    "wide": Variant("as the small one", wide=True),
    "labeller": Variant("pictures of poles, which it compares", "poles.labeller", version=2, wide=True),
    "gridwalk": Variant(
        "what is where on 3×3 and 4×4 grids of GridWalk-v0", "gridwalk.walker", ("gridwalk.lesson",), 3
    ),
    "geospot": Variant("where the pin is on the maps of GeoSpot-v0", "geospot.spotter", ("geospot.lesson",), 1),
    "scenes": Variant("what the pictures of NLVR2-v0 and Caption-v0 hold", "scenes.observer", ("scenes.lesson",), 3),
    "geo3k": Variant("the numbers in the triangles that Geo3k-v0 draws", "geo3k.geometer", ("geo3k.lesson",), 1),
    "zoom": Variant("what the views of Zoom-v0 show", "zoom.inspector", ("zoom.lesson",), 1),
    "minigrid": Variant("where agent and goal of MiniGrid's empty rooms are", "control.roamer", ("control.lesson",), 1),
    "mixture": Variant(
        "the shapes of Shapes-v0, and what the scenes and the zoom one know",
        "tiny.allrounder",
        ("scenes.lesson", "zoom.lesson"),
        1,
    ),
    # It reads two captions, compares each with the picture, and then both: two layers are too few.
    "judge": Variant(
        "as the scenes one, and which of two captions describes a picture better",
        "caption.judge",
        ("caption.lesson",),
        1,
        layers=4,
    ),
}

# What `model.path` calls them.
VARIANT_OF = {"tiny": "small", **{f"tiny-{name}": name for name in VARIANTS if name != "small"}}


def variant_named(name: str) -> Variant:
    """Raises UserInputError for an unknown name."""
    if name not in VARIANTS:
        raise UserInputError(f"Tiny model variant {name!r} is unknown; choose one of {', '.join(VARIANTS)}.")
    return VARIANTS[name]
