"""Draws an image in a terminal: each character is two pixels, one above the other."""

from __future__ import annotations

from PIL import Image
from rich.color import Color
from rich.style import Style
from rich.text import Text


def half_blocks(image: Image.Image, columns: int, rows: int) -> Text:
    """The image in at most `columns` × `rows` characters, its sides in proportion. It is made larger by whole factors only."""
    limit = min(columns / image.width, 2 * rows / image.height)
    scale = limit if limit < 1 else int(limit)
    width = max(1, round(image.width * scale))
    height = max(2, 2 * round(image.height * scale / 2))  # a character holds two
    method = Image.Resampling.BOX if scale < 1 else Image.Resampling.NEAREST
    pixels = image.convert("RGB").resize((width, height), method).load()
    assert pixels is not None
    text = Text()
    for row in range(0, height, 2):
        for column in range(width):
            above, below = (Color.from_rgb(*pixels[column, row + half]) for half in (0, 1))  # type: ignore[misc]
            text.append("▀", Style(color=above, bgcolor=below))
        text.append("\n")
    return text
