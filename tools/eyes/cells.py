"""What each part of a picture shows: the tower learns it from names, with no language model between.

The tower has one feature vector for each cell of 32 × 32 pixels. It is compared with the embeddings of names, so that
what is seen lies near the word for it. Conversations alone had taught colours, and no shape, after 340,000 of them.
"""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from tools.eyes.asking import LETTERS
from tools.eyes.brush import COLOURS, SHAPES, Brush
from tools.eyes.scenes import COLUMNS, ROWS, Thing
from tools.eyes.signs import DIE_TONES, WORDS, draw_die
from tools.eyes.ways import draw_arrow
from torch import Tensor
from torch.nn import functional

CELL = 32  # pixels
SIDES = (32, 64, 64, 64, 96, 96, 128, 128, 160, 224)
DIRECTIONS = ("right", "down", "left", "up")
GLYPHS = (*LETTERS, *map(str, range(10)))
NOTHING = "nothing"
# Of each of these a cell has one name or none.
GROUPS: dict[str, tuple[str, ...]] = {
    "what": tuple(dict.fromkeys((*SHAPES, *GLYPHS, *WORDS, *DIRECTIONS, "die", NOTHING))),
    "colour": tuple(COLOURS),
    "row": ROWS,
    "column": COLUMNS,
    "middle": ("one", "part"),  # whether the middle of the thing is in this cell: things are counted by it
}


def mosaic(rng: Random, side: int) -> tuple[Image.Image, list[Thing]]:
    """A picture of `side` × `side` pixels with things of all kinds."""
    b = Brush(rng)
    image = b.canvas(side)
    names, seen = b.colours(rng.randrange(1, 6), image), []
    for x, y, size in b.spots(rng.randrange(1, 1 + max(1, min(9, (side // 20) ** 2 // 2))), side, side):
        colour, kind = rng.choice(names), rng.random()
        if kind < 0.5:
            what = rng.choice(SHAPES)
            b.shape(image, what, x, y, size, colour, rng.choice([0, 0, 0, rng.uniform(-0.25, 0.25)]))
        elif kind < 0.8:
            what = rng.choice(GLYPHS)
            b.text(image, what, x, y, int(size * rng.uniform(0.8, 1.1)), b.tone(colour))
        elif kind < 0.87:
            what = rng.choice(WORDS)
            shown = rng.choice([what, what.upper(), what.capitalize()])
            b.text(image, shown, x, y, int(min(size, 1.6 * size / len(what))), b.tone(colour))
        elif kind < 0.95:
            what = rng.choice(DIRECTIONS)
            draw_arrow(image, what, x, y, size / 2, b.tone(colour), max(2, int(size * rng.uniform(0.1, 0.3))))
        else:
            what = "die"
            draw_die(image, rng.randrange(1, 7), x, y, size * 0.8, rng.choice(DIE_TONES))
        seen.append(Thing(what, colour if what != "die" else "", x / side, y / side, size / side))
    return image, seen


def named(seen: list[Thing], count: int) -> list[dict[str, str]]:
    """For each of count × count cells, row by row, its name in each group: of the thing that covers its middle, or nearly."""
    found = []
    for number in range(count**2):
        x, y = (number % count + 0.5) / count, (number // count + 0.5) / count
        gap, thing = min(
            ((max(abs(x - one.x), abs(y - one.y)) - one.size / 2, one) for one in seen), default=(99, None)
        )
        if thing is None or gap > 0.32 / count:
            found.append({"what": NOTHING})
            continue
        has_middle = max(abs(x - thing.x), abs(y - thing.y)) <= 0.5 / count
        names = {"what": thing.shape, "middle": "one" if has_middle else "part"}
        names |= {"row": ROWS[int(3 * y)], "column": COLUMNS[int(3 * x)]}
        found.append(names | ({"colour": thing.colour} if thing.colour else {}))
    return found


class Mosaics(NamedTuple):
    """Pictures of one size as the tower takes them, and for each group the index of each cell's name, or -1."""

    pixels: Tensor
    grid: Tensor
    targets: dict[str, Tensor]


def draw_mosaics(rng: Random, processor: Any, count: int) -> Mosaics:
    """At most `count` pictures: fewer large ones."""
    side = rng.choice(SIDES)
    cells_a_side = side // CELL
    drawn = [mosaic(rng, side) for _ in range(max(4, min(count, count * 16 // cells_a_side**2)))]
    pictures = [np.array(picture.convert("RGB")) for picture, _ in drawn]
    arrays = processor.image_processor(images=pictures, return_tensors="pt")
    cells = [names for _, seen in drawn for names in named(seen, cells_a_side)]
    targets = {
        group: torch.tensor([names.index(cell[group]) if group in cell else -1 for cell in cells])
        for group, names in GROUPS.items()
    }
    return Mosaics(arrays["pixel_values"], arrays["image_grid_thw"], targets)


class CellNames:
    """Scores the tower's features by the embeddings of the names."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model = model
        self._ids = {
            group: torch.tensor([_token(tokenizer, name) for name in names]) for group, names in GROUPS.items()
        }

    def scores(self, mosaics: Mosaics) -> dict[str, Tensor]:
        """For each group [cells, names]."""
        features = torch.cat(tuple(self._model.get_image_features(mosaics.pixels, mosaics.grid).pooler_output))
        features = functional.rms_norm(features, features.shape[-1:])
        embeddings = self._model.get_input_embeddings().weight
        return {group: features @ embeddings[ids].T for group, ids in self._ids.items()}

    def loss(self, mosaics: Mosaics) -> Tensor:
        """In nats: the mean of all groups, each over the cells that have a name of it."""
        scores = self.scores(mosaics)
        return torch.stack(
            [
                functional.cross_entropy(scores[group], target, ignore_index=-1)
                for group, target in mosaics.targets.items()
                if (target >= 0).any()
            ]
        ).mean()


def _token(tokenizer: Any, name: str) -> int:
    """The one within a sentence, where the name is one token; else its first."""
    ids = tokenizer(f" {name}", add_special_tokens=False)["input_ids"]
    return int((ids if len(ids) == 1 else tokenizer(name, add_special_tokens=False)["input_ids"])[0])
