"""Drawn geometry questions in levels of difficulty: what `Geo3k-v0` asks without a data set.

What is given and asked decides a problem's split, whatever the pose of its figure. With angles in steps of 20 degrees
there are too few problems for that (16 at level 1): there the picture decides.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from rl_vlm.types import EncodedImage, Split
from rl_vlm.zoo.drawing import split_of, split_of_content, stable_random
from rl_vlm.zoo.geo3k.figures import Figure, FigureLabel, Point, draw_figure

IMAGE_SIZE = 256
FIND = "Find x."
MIN_ANGLE = 20  # degrees: in narrower ones nothing could be read
AngleStep = Literal[1, 2, 5, 10, 20]  # divisors of MIN_ANGLE and of 180
# (leg, leg, hypotenuse), without the narrowest
_TRIPLES = ((3, 4, 5), (6, 8, 10), (5, 12, 13), (9, 12, 15), (8, 15, 17), (12, 16, 20), (15, 20, 25), (20, 21, 29))


@dataclass(frozen=True, slots=True)
class Problem:
    kind: str
    figure: Figure
    answer: str
    text: str = FIND

    @property
    def numbers(self) -> list[int]:
        return sorted(int(label.text) for label in self.figure.labels if label.text != "x")


def third_angle(rng: Random, step: int) -> Problem:
    """Level 1: two angles of a triangle are given, the third is asked."""
    unknown = _angle(rng, step, 180 - 2 * MIN_ANGLE)
    one = _angle(rng, step, 180 - unknown - MIN_ANGLE)
    return Problem("third_angle", _triangle(one, 180 - unknown - one, (one, 180 - unknown - one, "x")), str(unknown))


def isosceles(rng: Random, step: int) -> Problem:
    """Level 2: a triangle with two equal sides; the angle between them is asked, or given."""
    base = _angle(rng, step, 90 - MIN_ANGLE // 2)
    top = 180 - 2 * base
    asks_top = rng.random() < 0.5
    figure = _triangle(base, base, (base, "", "x") if asks_top else ("x", "", top), equal=True)
    return Problem("isosceles", figure, str(top if asks_top else base))


def exterior(rng: Random, step: int) -> Problem:
    """Level 2: of an exterior angle of a triangle and the two angles opposite, one is asked."""
    outer = MIN_ANGLE + _angle(rng, step, 180 - 2 * MIN_ANGLE)
    one = _angle(rng, step, outer - MIN_ANGLE)
    other = outer - one
    asks_outer = rng.random() < 0.5
    inner = _triangle(one, 180 - outer, (one, "", other if asks_outer else "x"))
    left, right, top = (line[0] for line in inner.lines)
    end = right + 0.6 * (right - left)
    label = _angle_label("x" if asks_outer else outer, right, end, top)
    angles = (*inner.angles, (right, end, top))
    figure = Figure((*inner.lines, (right, end)), (*inner.labels, label), angles=angles)
    return Problem("exterior", figure, str(outer if asks_outer else other))


def right_triangle(rng: Random, step: int) -> Problem:
    """Level 3: two sides of a right triangle are given, the third is asked."""
    sides = rng.choice(_TRIPLES)
    unknown = rng.randrange(3)
    one, other, _ = sides
    corners = (0j, complex(one, 0), complex(0, other))
    ends = ((0, 1), (0, 2), (1, 2))
    middle = sum(corners) / 3
    labels = [
        _side_label("x" if side == unknown else sides[side], corners[a], corners[b], middle)
        for side, (a, b) in enumerate(ends)
    ]
    lines = tuple((corners[a], corners[b]) for a, b in ends)
    figure = Figure(lines, tuple(labels), right_angles=(corners,))
    return Problem("right_triangle", figure, str(sides[unknown]))


def inscribed(rng: Random, step: int) -> Problem:
    """Level 4: of an inscribed angle and the central angle over the same arc one is asked."""
    angle = _angle(rng, step, 80)
    asks_central = rng.random() < 0.5
    one, other = _on_circle(angle), _on_circle(-angle)
    vertex = _on_circle(180 + angle * rng.uniform(-0.7, 0.7))  # opposite, with the centre inside the angle
    labels = (
        _angle_label("x" if asks_central else 2 * angle, 0j, one, other),
        FigureLabel(str(angle) if asks_central else "x", vertex, vertex, "°" * asks_central),
    )
    lines = ((vertex, one), (vertex, other), (0j, one), (0j, other))
    figure = Figure(lines, labels, circles=((0j, 1.0),), dots=(0j,), angles=((vertex, one, other), (0j, one, other)))
    return Problem("inscribed", figure, str(2 * angle if asks_central else angle))


def semicircle(rng: Random, step: int) -> Problem:
    """Level 4: a right triangle on a diameter; one acute angle is given, the other asked."""
    angle = _angle(rng, step, 90 - MIN_ANGLE)
    left, right, top = -1 + 0j, 1 + 0j, _on_circle(2 * angle)
    figure = Figure(
        ((left, right), (right, top), (top, left)),
        (FigureLabel(str(angle), left, left, "°"), FigureLabel("x", right, right)),
        circles=((0j, 1.0),),
        dots=(0j,),
        angles=((left, right, top), (right, left, top)),
    )
    return Problem("semicircle", figure, str(90 - angle))


def triangle_area(rng: Random, step: int) -> Problem:
    """Level 5: the area of a triangle of given base and height."""
    base = 2 * rng.randint(3, 15)
    height = rng.randint(math.ceil(0.6 * base), base)
    foot, top = complex(base * rng.uniform(0.35, 0.65), 0), complex(0, -height)
    top += foot
    left, right = 0j, complex(base, 0)
    wider = right if foot.real < base / 2 else left
    figure = Figure(
        ((left, right), (right, top), (top, left)),
        (_side_label(base, left, right, top), FigureLabel(str(height), foot + 0.3 * (top - foot), wider - foot)),
        dashed=((foot, top),),
        right_angles=((foot, top, left + right - wider),),
    )
    return Problem("triangle_area", figure, str(base * height // 2), "Find the area of the triangle.")


def circle_area(rng: Random, step: int) -> Problem:
    r"""Level 5: the area of a circle of given radius or diameter, as a multiple of \pi."""
    radius, whole = rng.randint(2, 20), rng.random() < 0.5
    start = -1 + 0j if whole else 0j
    label = FigureLabel(str(2 * radius if whole else radius), (start + 1) / 2, 1j)
    figure = Figure(((start, 1 + 0j),), (label,), circles=((0j, 1.0),), dots=(0j,))
    return Problem("circle_area", figure, rf"{radius**2}\pi", "Find the area of the circle.")


def rectangle_area(rng: Random, step: int) -> Problem:
    """Level 5: the area of a rectangle of given side and diagonal."""
    width, height, diagonal = rng.choice(_TRIPLES)
    corners = (0j, complex(width, 0), complex(width, height), complex(0, height))
    centre = corners[2] / 2
    figure = Figure(
        (*zip(corners, (*corners[1:], corners[0]), strict=True), (corners[0], corners[2])),
        (_side_label(width, corners[0], corners[1], centre), FigureLabel(str(diagonal), centre, corners[3] - centre)),
        right_angles=((corners[1], corners[0], corners[2]),),
    )
    return Problem("rectangle_area", figure, str(width * height), "Find the area of the rectangle.")


LEVELS: dict[int, tuple[Callable[[Random, int], Problem], ...]] = {
    1: (third_angle,),
    2: (isosceles, exterior),
    3: (right_triangle,),
    4: (inscribed, semicircle),
    5: (triangle_area, circle_area, rectangle_area),
}
# Pixels per side that leave room for the numbers; those of level 5 stand inside the figures.
LEAST_SIZE = {1: 64, 2: 64, 3: 64, 4: 64, 5: 128}


def _angle(rng: Random, step: int, most: int) -> int:
    return rng.randrange(MIN_ANGLE, most + 1, step)


def _on_circle(degrees: float) -> Point:
    return cmath.rect(1, math.radians(degrees))


def _triangle(left: int, right: int, shown: Sequence[int | str], equal: bool = False) -> Figure:
    """The triangle with these angles (degrees) at its base of length 1; `shown`: the labels of its corners."""
    rise = math.sin(math.radians(right)) / math.sin(math.radians(left + right))
    corners = (0j, 1 + 0j, rise * _on_circle(-left))
    sides = tuple(zip(corners, (*corners[1:], corners[0]), strict=True))
    labels, angles = [], []
    for number, text in enumerate(shown):
        vertex, one, other = (corners[(number + k) % 3] for k in range(3))
        if text != "":
            outside = 2 * vertex - one, 2 * vertex - other  # where there is room
            labels.append(_angle_label(text, vertex, *outside))
            angles.append((vertex, one, other))
    return Figure(sides, tuple(labels), angles=tuple(angles), equal=sides[1:] if equal else ())


def _angle_label(text: int | str, vertex: Point, one: Point, other: Point) -> FigureLabel:
    first, second = ((point - vertex) / abs(point - vertex) for point in (one, other))
    return FigureLabel(str(text), vertex, first + second, "" if text == "x" else "°")


def _side_label(text: int | str, one: Point, other: Point, inside: Point) -> FigureLabel:
    """A label at the middle of a side, away from a point inside the figure."""
    across = 1j * (other - one)
    outwards = ((inside - one) / across).real < 0
    return FigureLabel(str(text), (one + other) / 2, across if outwards else -across)


Level = Annotated[int, Field(ge=1, le=max(LEVELS))]


@lru_cache(maxsize=4096)
def drawn_problem(
    levels: tuple[int, ...], angle_step: int, image_size: int, split: Split, index: int, seed: int = 0
) -> tuple[Problem, EncodedImage]:
    """Problem `index` of a split and its picture; the levels take turns. Cached, for the copies of a group."""
    rng = stable_random("geo3k", levels, angle_step, image_size, split, index, seed)
    kinds, by_picture = LEVELS[levels[index % len(levels)]], angle_step == 20
    while True:
        problem = rng.choice(kinds)(rng, angle_step)
        if not by_picture and split_of_content([problem.kind, problem.numbers, problem.answer]) != split:
            continue
        picture = draw_figure(problem.figure, rng, image_size)
        if not by_picture or split_of(np.asarray(picture)) == split:
            return problem, EncodedImage.from_pil(picture)
