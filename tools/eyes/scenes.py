"""Scenes of several things with several questions each: what one picture shows is asked from many sides."""

from __future__ import annotations

from random import Random
from typing import NamedTuple

from PIL import Image
from tools.eyes.brush import SHAPES, Brush

ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "middle", "right")
EXTREMES = {
    "leftmost": lambda thing: thing.x,
    "rightmost": lambda thing: -thing.x,
    "highest": lambda thing: thing.y,
    "lowest": lambda thing: -thing.y,
    "largest": lambda thing: -thing.size,
    "smallest": lambda thing: thing.size,
}

Question = tuple[str, str]  # and its answer


class Thing(NamedTuple):
    """x, y, size: the middle and the diameter, as fractions of the picture's sides."""

    shape: str
    colour: str
    x: float
    y: float
    size: float

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"

    @property
    def place(self) -> str:
        row, column = ROWS[min(2, int(self.y * 3))], COLUMNS[min(2, int(self.x * 3))]
        return " ".join(dict.fromkeys(word for word in (row, column) if word != "middle")) or "middle"


def scene(rng: Random) -> tuple[Image.Image, list[Thing]]:
    b, n = Brush(rng), rng.choice([1, 2, 2, 3, 3, 4, 4, 5, 6, 7])
    image = b.canvas(b.side(48 if n < 5 else 64))
    names, shapes, (w, h) = b.colours(rng.randrange(2, 6), image), rng.sample(SHAPES, rng.randrange(2, 6)), image.size
    if rng.random() < 0.6:
        spots = b.spots(n, w, h)
    else:  # in the cells of a grid
        cells, side = rng.sample([(c, r) for c in range(3) for r in range(3)], n), min(w, h) / 3
        middle = lambda cell, length: (cell + rng.uniform(0.4, 0.6)) * length / 3  # noqa: E731
        spots = [(middle(c, w), middle(r, h), rng.uniform(0.5, 0.9) * side) for c, r in cells]
    things = []
    for x, y, d in spots:
        thing = Thing(rng.choice(shapes), rng.choice(names), x / w, y / h, d / min(w, h))
        b.shape(image, thing.shape, x, y, d, thing.colour)
        things.append(thing)
    return image, things


def questions(rng: Random, things: list[Thing]) -> list[Question]:
    """All that may be asked, in random order."""
    asked = [one for thing in things for one in _about_one(rng, thing, things)]
    asked += _about_numbers(rng, things)
    if len(things) > 1:
        asked += _about_two(rng, things) + _about_extremes(rng, things)
    rng.shuffle(asked)
    return asked


def _about_one(rng: Random, thing: Thing, things: list[Thing]) -> list[Question]:
    """What is certain about it because no other thing is like it."""

    def alone(what: str) -> bool:
        return sum(getattr(other, what) == getattr(thing, what) for other in things) == 1

    colour, shape, name, place = thing.colour, thing.shape, thing.name, thing.place
    asked = []
    if alone("shape"):
        wordings = [
            "What colour is the {}?",
            "Which colour has the {}?",
            "colour of the {}?",
            "The {} is which colour?",
        ]
        asked.append((rng.choice(wordings).format(shape), colour))
    if alone("colour"):
        wordings = ["Which shape is {}?", "What is the {} thing?", "What shape has the {} one?"]
        asked.append((rng.choice(wordings).format(colour), shape))
    if alone("name"):
        asked.append((rng.choice(["Where is the {}?", "In which part is the {}?"]).format(name), place))
        if rng.random() < 0.3:
            wordings = ["x and y of the {}, from 0 to 1?", "Point at the {}: x, y as fractions."]
            asked.append((rng.choice(wordings).format(name), f"{thing.x:.1f}, {thing.y:.1f}"))
    if alone("place"):
        wordings = ["What is at the {}?", "What do you see {}?", "{}?"]
        asked.append((rng.choice(wordings).format(place), rng.choice([name, f"a {name}"])))
    return asked


def _about_numbers(rng: Random, things: list[Thing]) -> list[Question]:
    shapes, colours = [thing.shape for thing in things], [thing.colour for thing in things]
    shape, colour = rng.choice(shapes), rng.choice(colours)
    wordings = ["How many {} are there?", "Count the {}.", "How many {}?"]
    everything = ["How many things are there?", "Count all.", "How many shapes do you see?", "How many objects?"]
    sought = rng.choice(shapes if rng.random() < 0.5 else [one for one in SHAPES if one not in shapes])
    asked = [
        (rng.choice(wordings).format(f"{colour} things"), str(colours.count(colour))),
        (rng.choice(wordings).format(f"{shape}s"), str(shapes.count(shape))),
        (rng.choice(everything), str(len(things))),
        (rng.choice(["Is there a {}?", "Do you see a {}?", "a {}?"]).format(sought), _yes(sought in shapes)),
    ]
    if len(set(colours)) > 1:
        pair = rng.sample(list(dict.fromkeys(colours)), 2)
        if colours.count(pair[0]) != colours.count(pair[1]):
            asked.append((f"Are there more {pair[0]} or more {pair[1]} things?", max(pair, key=colours.count)))
    return asked


def _about_two(rng: Random, things: list[Thing]) -> list[Question]:
    one, other = rng.sample(things, 2)
    names = [thing.name for thing in things]
    if names.count(one.name) > 1 or names.count(other.name) > 1:
        return []
    asked = []
    if abs(one.x - other.x) > 0.12:
        side, truth = rng.choice(["left", "right"]), "left" if one.x < other.x else "right"
        asked.append((f"Is the {one.name} {side} of the {other.name}?", _yes(side == truth)))
        asked.append((f"Left or right: where is the {one.name}, seen from the {other.name}?", truth))
    if abs(one.y - other.y) > 0.12:
        side, truth = rng.choice(["above", "below"]), "above" if one.y < other.y else "below"
        asked.append((f"Is the {one.name} {side} the {other.name}?", _yes(side == truth)))
    return asked


def _about_extremes(rng: Random, things: list[Thing]) -> list[Question]:
    asked = []
    for word, key in EXTREMES.items():
        first, second = sorted(things, key=key)[:2]
        if abs(key(first) - key(second)) > 0.06 and rng.random() < 0.4:
            about = rng.choice(["colour", "shape", "thing"])
            answer = first.name if about == "thing" else getattr(first, about)
            asked.append((rng.choice([f"Which {about} is {word}?", f"What is the {word} {about}?"]), answer))
    return asked


def _yes(true: bool) -> str:
    return "yes" if true else "no"


def described(rng: Random, things: list[Thing]) -> Question:
    """All things from top left to bottom right, with or without their places."""
    ordered = sorted(things, key=lambda thing: (min(2, int(thing.y * 3)), min(2, int(thing.x * 3)), thing.x))
    if rng.random() < 0.5:
        asked = ["Describe the picture.", "Tell me what is where.", "What is shown, and where?"]
        return rng.choice(asked), ", ".join(f"{thing.name} {thing.place}" for thing in ordered)
    asked = ["What do you see?", "List the things.", "Name all things from top to bottom.", "What is in the picture?"]
    return rng.choice(asked), ", ".join(thing.name for thing in ordered)
