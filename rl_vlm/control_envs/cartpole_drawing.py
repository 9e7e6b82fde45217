"""Draws the cart and its pole with PIL: no display, no OpenGL, equal bytes on every machine."""

from __future__ import annotations

import math

import numpy as np
from PIL import Image, ImageDraw

SIZE = 200  # of the layout below, in pixels
_SUPERSAMPLING = 2  # PIL does not smooth edges: draw larger, then average
_GROUND_Y = 160.0  # the rail, which goes through the middle of the cart
_CART_WIDTH, _CART_HEIGHT = 50.0, 30.0
_AXLE_Y = _GROUND_Y - _CART_HEIGHT / 4
_POLE_WIDTH, _POLE_LENGTH = 10.0, 125.0
_WHITE, _BLACK, _BROWN, _AXLE = (255, 255, 255), (0, 0, 0), (202, 152, 101), (129, 132, 203)


def draw_cartpole(angle: float, size: int = SIZE) -> np.ndarray:
    """uint8 [size, size, 3]: a black cart in the middle and a brown pole on it.

    `angle` is in radians, 0 is upright, positive leans to the right. The picture follows the cart and does
    not show its place on the rail.
    """
    scale = size * _SUPERSAMPLING / SIZE
    side = size * _SUPERSAMPLING
    image = Image.new("RGB", (side, side), _WHITE)
    draw = ImageDraw.Draw(image)
    middle = SIZE / 2

    def box(left: float, top: float, right: float, bottom: float) -> tuple[float, float, float, float]:
        return left * scale, top * scale, right * scale - 1, bottom * scale - 1

    half = _CART_WIDTH / 2
    draw.rectangle(
        box(middle - half, _GROUND_Y - _CART_HEIGHT / 2, middle + half, _GROUND_Y + _CART_HEIGHT / 2), _BLACK
    )
    draw.line((0, _GROUND_Y * scale, side, _GROUND_Y * scale), _BLACK, width=max(1, round(scale)))
    sine, cosine = math.sin(angle), math.cos(angle)
    across, below, above = _POLE_WIDTH / 2, -_POLE_WIDTH / 2, _POLE_LENGTH - _POLE_WIDTH / 2
    corners = [(-across, below), (-across, above), (across, above), (across, below)]
    turned = [(middle + x * cosine + y * sine, _AXLE_Y + x * sine - y * cosine) for x, y in corners]
    draw.polygon([(x * scale, y * scale) for x, y in turned], _BROWN)
    draw.ellipse(box(middle - across, _AXLE_Y - across, middle + across, _AXLE_Y + across), _AXLE)
    return np.asarray(image.reduce(_SUPERSAMPLING)).copy()
