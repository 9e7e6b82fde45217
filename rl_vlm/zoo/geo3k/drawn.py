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
from PIL import Image, ImageDraw, ImageFont
from pydantic import Field

from rl_vlm.types import EncodedImage, Split
from rl_vlm.zoo.drawing import split_of, split_of_content, stable_random

# Mid-grey is 0 to the models, so that the figure alone carries signal, and lines and labels differ in sign.
GROUND, INK, CHALK = 128, 0, 255
CELL = 16  # pixels: labels stand in whole patches of Qwen3-VL's vision tower, so that the tiny model can read them
_DETAILED = 128  # pixels: smaller drawings have neither degree signs nor arcs in their angles
_CANVAS = 256  # pixels: lines are drawn at least so large, and at least twice as large as they are shown, then averaged
_MAX_POSES = 100

Point = complex  # x + iy, y downwards
Angle = tuple[Point, Point, Point]  # the vertex and a point on either side
Box = tuple[int, int, int, int]  # left, top, right, bottom


@dataclass(frozen=True, slots=True)
class FigureLabel:
    """A text, and in which direction from which point it stands. `unit` is left out of small drawings."""

    text: str
    at: Point
    towards: Point
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Figure:
    """What is drawn. Circles are (centre, radius); arcs mark `angles`, squares `right_angles`, ticks `equal` sides."""

    lines: tuple[tuple[Point, Point], ...]
    labels: tuple[FigureLabel, ...]
    dashed: tuple[tuple[Point, Point], ...] = ()
    circles: tuple[tuple[Point, float], ...] = ()
    dots: tuple[Point, ...] = ()
    angles: tuple[Angle, ...] = ()
    right_angles: tuple[Angle, ...] = ()
    equal: tuple[tuple[Point, Point], ...] = ()


def draw_figure(figure: Figure, rng: Random, size: int) -> Image.Image:
    """The figure in a random pose (turned, mirrored, a little smaller), RGB, `size` pixels a side.

    A pose in which a label would touch a line, another label or the edge is drawn again.
    """
    for _ in range(_MAX_POSES):
        pose = _Pose.random(figure, rng, size)
        picture = _lines(figure, pose, size)
        boxes = _label_boxes(figure, pose, picture)
        if boxes is not None:
            pen, font = ImageDraw.Draw(picture), _font(_font_size(size))
            for text, (left, top, right, bottom) in boxes:
                pen.text(((left + right) // 2, (top + bottom) // 2), text, CHALK, font, anchor="mm")
            return picture.convert("RGB")
    raise RuntimeError(f"{figure} leaves no room for its labels in {size} pixels.")  # a fault of the figure's code


@dataclass(frozen=True, slots=True)
class _Pose:
    """Where the points of a figure are in the picture: turned, mirrored, then scaled and shifted; in pixels."""

    turn: Point
    mirrored: bool
    scale: float
    shift: Point

    @classmethod
    def random(cls, figure: Figure, rng: Random, size: int) -> _Pose:
        upright = cls(cmath.rect(1, math.radians(rng.randrange(360))), rng.random() < 0.5, 1.0, 0j)
        points = [upright.place(point) for line in (*figure.lines, *figure.dashed) for point in line]
        for centre, radius in figure.circles:
            middle, reach = upright.place(centre), radius * (1 + 1j)
            points += [middle - reach, middle + reach]
        xs, ys = [point.real for point in points], [point.imag for point in points]
        room = size - 2 * max(CELL, _font_size(size) + size / 16)  # labels stand around the figure
        scale = room * rng.uniform(0.85, 1.0) / max(max(xs) - min(xs), max(ys) - min(ys))
        middle = complex(min(xs) + max(xs), min(ys) + max(ys)) / 2
        return cls(upright.turn, upright.mirrored, scale, complex(size, size) / 2 - scale * middle)

    def place(self, point: Point) -> Point:
        return self.direction(point) * self.scale + self.shift

    def direction(self, towards: Point) -> Point:
        return (towards.conjugate() if self.mirrored else towards) * self.turn


def _lines(figure: Figure, pose: _Pose, size: int) -> Image.Image:
    """The picture without its labels."""
    zoom = max(2, _CANVAS // size)
    canvas = Image.new("L", (size * zoom,) * 2, GROUND)
    pen = ImageDraw.Draw(canvas)
    width = zoom * max(1, size // 150)
    mark = size / 13  # pixels: the length of what marks angles and sides

    def line(*points: Point) -> None:
        pen.line([(zoom * point.real, zoom * point.imag) for point in points], INK, width)

    def circle(centre: Point, radius: float, fill: int | None = None) -> None:
        pen.circle((zoom * centre.real, zoom * centre.imag), zoom * radius, fill, INK, width)

    for one, other in figure.lines:
        line(pose.place(one), pose.place(other))
    for one, other in figure.dashed:
        start, step = pose.place(one), (pose.place(other) - pose.place(one)) / 9
        for dash in range(0, 9, 2):
            line(start + dash * step, start + (dash + 1) * step)
    for centre, radius in figure.circles:
        circle(pose.place(centre), radius * pose.scale)
    for dot in figure.dots:
        circle(pose.place(dot), 1.5 * width / zoom, fill=INK)
    for vertex, one, other in figure.right_angles:
        a, b = (mark * _unit(pose.direction(point - vertex)) for point in (one, other))
        corner = pose.place(vertex)
        line(corner + a, corner + a + b, corner + b)
    for one, other in figure.equal:
        middle, across = pose.place((one + other) / 2), 0.5j * mark * _unit(pose.direction(other - one))
        line(middle - across, middle + across)
    if size >= _DETAILED:
        for vertex, one, other in figure.angles:
            first, second = (pose.direction(point - vertex) for point in (one, other))
            opening = cmath.phase(second / first)
            line(*(pose.place(vertex) + mark * _unit(first) * cmath.rect(1, opening * k / 12) for k in range(13)))
    return canvas.reduce(zoom)


def _label_boxes(figure: Figure, pose: _Pose, lines: Image.Image) -> list[tuple[str, Box]] | None:
    """Where the labels stand, each at the nearest free place in its direction; None if one has no place."""
    size = lines.width
    placed: list[tuple[str, Box]] = []
    for label in figure.labels:
        text = label.text + (label.unit if size >= _DETAILED else "")
        start, step = pose.place(label.at), _unit(pose.direction(label.towards))
        for distance in range(CELL // 4, size // 3 + CELL, 2):
            box = left, top, right, bottom = _cells(start + distance * step, _text_width(text, size), _font_size(size))
            if min(box) < 0 or max(box) > size:
                return None
            taken = any(left < one[2] and one[0] < right and top < one[3] and one[1] < bottom for _, one in placed)
            if not taken and lines.crop(box).getextrema() == (GROUND, GROUND):
                placed.append((text, box))
                break
        else:
            return None
    return placed


def _cells(middle: Point, width: int, height: int) -> Box:
    """The box of whole cells around a text of this size that is nearest to `middle`."""
    columns, rows = -(-width // CELL), -(-height // CELL)
    left = round(middle.real / CELL - columns / 2) * CELL
    top = round(middle.imag / CELL - rows / 2) * CELL
    return left, top, left + columns * CELL, top + rows * CELL


def _unit(vector: Point) -> Point:
    return vector / abs(vector)


def _font_size(size: int) -> int:
    """Pixels of the labels' font: three digits fill one cell of the smallest drawing."""
    return max(9, size // 16)


@lru_cache(maxsize=32)
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)  # Pillow's own, nothing is fetched


@lru_cache(maxsize=1024)
def _text_width(text: str, size: int) -> int:
    margin = size // 64 - 1  # pixels; a number in the smallest drawing has none to spare
    return math.ceil(_font(_font_size(size)).getlength(text)) + margin


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


IMAGE_SIZE = 256

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
