"""Scenes of a few shapes, statements about two of them and captions of one: what `NLVR2-v0` and `Caption-v0` draw.

A scene is one to four shapes on mid-grey, at most one in each quadrant. The hash of what it holds decides its split,
and a scene of the other split is drawn again: no picture of a test item is ever trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Literal

from PIL import Image

from rl_vlm.types import EncodedImage, Split
from rl_vlm.zoo.drawing import (
    COLOURS,
    CORNERS,
    IMAGE_SIZE,
    KINDS,
    MAX_SHAPES,
    Shape,
    render,
    split_of_content,
    stable_random,
)

Scene = tuple[Shape, ...]
Look = tuple[str, str]  # colour and kind
StatementKind = Literal["equal", "sum", "one", "more"]

STATEMENT_KINDS: tuple[StatementKind, ...] = ("equal", "sum", "one", "more")
LOOKS: tuple[Look, ...] = tuple((colour, kind) for colour in COLOURS for kind in KINDS)
MAX_CAPTIONED = 3  # shapes of a captioned scene
# Pixels of a 64-pixel drawing. So narrow that the area shows the kind: squares fill 676 to 784 pixels, circles 540 to
# 616, triangles 364 to 420. With 12 to 22 or 20 to 28 pixels the tiny model learned colours and numbers, but no kinds.
_MIN_SIZE, _MAX_SIZE = 26, 28


def random_scene(rng: Random, looks: Sequence[Look], split: Split) -> Scene:
    """Shapes of these looks in random quadrants, of random size and place in it; in the order of the quadrants."""
    half = IMAGE_SIZE // 2
    while True:
        shapes = []
        for quadrant, (colour, kind) in zip(sorted(rng.sample(range(MAX_SHAPES), len(looks))), looks, strict=True):
            size = rng.randint(_MIN_SIZE, _MAX_SIZE)
            room = half - size - 1  # one pixel of grey on either side keeps neighbours apart
            x, y = ((quadrant % 2) * half, (quadrant // 2) * half)
            shapes.append(Shape(quadrant, kind, colour, x + rng.randint(1, room), y + rng.randint(1, room), size))
        if split_of_content([(one.kind, one.colour, one.x, one.y, one.size) for one in shapes]) == split:
            return tuple(shapes)


def picture_of(scene: Scene, image_size: int = IMAGE_SIZE) -> EncodedImage:
    return EncodedImage.from_pil(Image.fromarray(render(scene, image_size)))


@dataclass(frozen=True, slots=True)
class Noun:
    """Which shapes a statement is about: those of a colour, or all.

    Not those of a kind: the tiny model recognises kinds, but counted the shapes of a kind rightly one time in four.
    """

    colour: str = ""

    def matches(self, look: Look) -> bool:
        return self.colour in ("", look[0])

    def count(self, scene: Scene) -> int:
        return sum(self.matches((shape.colour, shape.kind)) for shape in scene)

    def __str__(self) -> str:
        return f"{self.colour} shape".strip()

    @property
    def counts(self) -> range:
        """How many a scene may hold: there is always a shape."""
        return range(0 if self.colour else 1, MAX_SHAPES + 1)


SOME = tuple(Noun(colour) for colour in COLOURS)
EVERY = Noun()


@dataclass(frozen=True, slots=True)
class Statement:
    """A sentence about how many shapes the left and the right image hold, true or false.

    kind: "equal" (equally many), "sum" (`number` in both together), "one" (exactly one of the images holds any) or
    "more" (image `number`, 0 for left, holds more).
    """

    kind: StatementKind
    noun: Noun
    number: int = 0

    def holds(self, left: int, right: int) -> bool:
        if self.kind == "equal":
            return left == right
        if self.kind == "sum":
            return left + right == self.number
        if self.kind == "one":
            return (left > 0) != (right > 0)
        return right > left if self.number else left > right

    def __str__(self) -> str:
        if self.kind == "equal":
            return f"Both images hold equally many {self.noun}s."
        if self.kind == "sum":
            return f"The images hold {self.number} {self.noun}{'s' * (self.number != 1)} in all."
        if self.kind == "one":
            return f"Exactly one image holds a {self.noun}."
        sides = ("left", "right")
        return f"The {sides[self.number]} image holds more {self.noun}s than the {sides[1 - self.number]}."


def random_statement(rng: Random, kinds: Sequence[StatementKind]) -> Statement:
    kind = rng.choice(kinds)
    if kind == "more":
        return Statement(kind, rng.choice(SOME), rng.randrange(2))
    noun = rng.choice(SOME) if kind == "one" else rng.choice((*SOME, EVERY))
    if kind == "sum":
        # With every other sum there is an image that decides alone.
        return Statement(kind, noun, rng.choice((3, 4, 5, 6, 7) if noun == EVERY else (1, 2, 3, 4)))
    return Statement(kind, noun)


@cache
def count_pairs(statement: Statement, truth: bool) -> tuple[tuple[int, int], ...]:
    """The (left, right) counts with which a statement is shown, to be drawn from uniformly; some come several times.

    One count alone says nothing: for each count of either image the statement is true half the time. Only "more" cannot
    be balanced at its ends (an image without any never holds more). There the counts differ by one, so that a guess
    from one image is right 5/8 of the time, the least that is possible.
    """
    counts = statement.noun.counts
    if statement.kind == "more":
        steps = [(k + 1, k) for k in counts[:-1]]
        return tuple(pair if truth == (statement.number == 0) else pair[::-1] for pair in steps)
    if statement.kind == "one":
        some = range(1, MAX_SHAPES)  # as often as none, whether it is true or false
        if truth:
            return tuple(pair for k in some for pair in ((0, k), (k, 0)))
        return ((0, 0),) * len(some) ** 2 + tuple((j, k) for j in some for k in some)
    if statement.kind == "sum":
        counts = range(max(counts[0], statement.number - MAX_SHAPES), min(MAX_SHAPES, statement.number - counts[0]) + 1)
    return tuple((a, b) for a in counts for b in counts if statement.holds(a, b) == truth)


def counted_scene(rng: Random, noun: Noun, count: int, split: Split) -> Scene:
    """A random scene that holds `count` of the shapes that are meant, and perhaps others."""
    matching = [look for look in LOOKS if noun.matches(look)]
    others = [look for look in LOOKS if not noun.matches(look)]
    more = rng.randint(not count, MAX_SHAPES - count) if others else 0
    looks = [rng.choice(matching) for _ in range(count)] + [rng.choice(others) for _ in range(more)]
    rng.shuffle(looks)
    return random_scene(rng, looks, split)


@dataclass(frozen=True, slots=True)
class StatedPair:
    left: Scene
    right: Scene
    statement: Statement
    truth: bool


def stated_pair(rng: Random, truth: bool, split: Split, kinds: Sequence[StatementKind] = STATEMENT_KINDS) -> StatedPair:
    """A random statement with two scenes of which it is true or false."""
    statement = random_statement(rng, kinds)
    left, right = (
        counted_scene(rng, statement.noun, count, split) for count in rng.choice(count_pairs(statement, truth))
    )
    return StatedPair(left, right, statement, truth)


def pair_item(
    split: Split, index: int, seed: int = 0, kinds: tuple[StatementKind, ...] = STATEMENT_KINDS
) -> StatedPair:
    """Task instance `index` of NLVR2-v0: of two neighbours one is true."""
    return stated_pair(stable_random("nlvr2", split, index, seed), index % 2 == 0, split, kinds)


def caption_item(split: Split, index: int, seed: int = 0) -> Scene:
    """Task instance `index` of Caption-v0: a scene of one to three shapes."""
    rng = stable_random("caption", split, index, seed)
    return random_scene(rng, [rng.choice(LOOKS) for _ in range(1 + index % MAX_CAPTIONED)], split)


def caption_of(scene: Scene) -> str:
    """Everything there is to see: "a red circle at the top left and a blue square at the bottom left"."""
    return joined([f"a {shape.colour} {shape.kind} at the {CORNERS[shape.quadrant]}" for shape in scene])


def joined(phrases: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return " and ".join(filter(None, (", ".join(phrases[:-1]), phrases[-1])))
