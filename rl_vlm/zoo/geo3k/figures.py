"""Geometry figures as data, and how they are drawn: posed at random, with labels that touch nothing."""

from __future__ import annotations

import cmath
import math
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from PIL import Image, ImageDraw, ImageFont

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
