"""Boxes and points in an image as models write them: numbers in brackets or bare, two points, named corners."""

from __future__ import annotations

import re

from rl_vlm.rewards.text import usual_width

_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?"
_NEXT = rf"(?:px)?[\s,;]+{_NUMBER}"
# Four numbers, perhaps with a confidence, and two of a point.
BRACKETS = re.compile(rf"[\[(]\s*({_NUMBER}(?:{_NEXT}){{3}})(?:px)?(?:[\s,;]+(?:0?\.\d+|[01]))?\s*[\])]")
_POINT = re.compile(rf"[\[(]\s*({_NUMBER}{_NEXT})(?:px)?\s*[\])]")
_NAMED = re.compile(rf"""(?<![A-Za-z])([A-Za-z_]+\d?)["']?\s*[:=]\s*["']?({_NUMBER})(?![\w.])""")
_BARE = re.compile(rf"(?<![\w.]){_NUMBER}(?:{_NEXT})*(?![\w.])")
# Names of the corners, and of a corner and the size.
_NAMES = ("x0 y0 x1 y1", "x1 y1 x2 y2", "xmin ymin xmax ymax", "left top right bottom")
_SIZES = ("x y w h", "x y width height", "left top width height")
_MOST = 1e9  # a coordinate beyond it is none


def box_of(text: str) -> tuple[float, float, float, float] | None:
    """x1, y1, x2, y2 of the last box in the first of these forms that a text has; None without one, or if x2 <= x1."""
    numbers = _numbers_of(usual_width(text))
    if len(numbers) != 4 or not all(abs(number) < _MOST for number in numbers):
        return None
    x1, y1, x2, y2 = numbers
    return (x1, y1, x2, y2) if x1 < x2 and y1 < y2 else None


def point_of(text: str) -> tuple[float, float] | None:
    """x, y of the last point that a text has, in brackets, by names or bare (`click(8, 9)`, `{"point_2d": [8, 9]}`,
    `x=8, y=9`, `<point>8 9</point>`), or the centre of its box; None without one."""
    text = usual_width(text)
    if (box := box_of(text)) is not None:
        return (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    named = {name.lower(): float(number) for name, number in _NAMED.findall(text)}
    pairs = [_numbers(pair) for pair in _POINT.findall(text)]
    pairs = pairs or [[named[name] for name in "xy" if name in named]]
    if len(pairs[-1]) != 2:
        pairs = [found for run in _BARE.findall(text) if len(found := _numbers(run)) == 2]
    return (pairs[-1][0], pairs[-1][1]) if pairs and all(abs(one) < _MOST for one in pairs[-1]) else None


def _numbers_of(text: str) -> list[float]:
    if four := BRACKETS.findall(text):
        return _numbers(four[-1])
    if len(points := _POINT.findall(text)) > 1:
        return _numbers(" ".join(points[-2:]))
    named = {name.lower().replace("_", ""): float(number) for name, number in _NAMED.findall(text)}
    for names in map(str.split, _NAMES + _SIZES):
        if named.keys() >= set(names):
            x1, y1, x2, y2 = (named[name] for name in names)
            return [x1, y1, x1 + x2, y1 + y2] if " ".join(names) in _SIZES else [x1, y1, x2, y2]
    return next((found for run in reversed(_BARE.findall(text)) if len(found := _numbers(run)) == 4), [])


def _numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(_NUMBER, text)]


def overlap(said: str, truth: str) -> float:
    """Intersection over union of the boxes of two texts; 0 where one has none."""
    ours, theirs = box_of(said), box_of(truth)
    if ours is None or theirs is None:
        return 0.0
    (a1, b1, a2, b2), (c1, d1, c2, d2) = ours, theirs
    shared = max(0.0, min(a2, c2) - max(a1, c1)) * max(0.0, min(b2, d2) - max(b1, d1))
    return shared / ((a2 - a1) * (b2 - b1) + (c2 - c1) * (d2 - d1) - shared)
