"""The tool of Zoom-v0: the parts of a picture that a turn asks for, cut out and enlarged."""

from __future__ import annotations

import re
from dataclasses import dataclass

from PIL import Image

from rl_vlm.envs.tool_forms import ToolCallError
from rl_vlm.envs.tools import parse_tool_call
from rl_vlm.types import EncodedImage

TOOL = "crop"
WHOLE = 1000  # coordinates are thousandths of the picture's width and height, as Qwen3-VL writes them
MIN_SIDE = 10  # thousandths
MAX_RATIO = 10  # of a crop's sides in pixels: image processors reject very narrow images
_BRIEF = re.compile(r"(?:.*\s)?zoom (top|bottom) (left|right)[\s.]*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Crop:
    """A part of a picture: left, top, width and height in thousandths of the picture's width and height."""

    x: float
    y: float
    w: float
    h: float


QUADRANTS = {
    f"{row} {column}": Crop(x, y, WHOLE // 2, WHOLE // 2)
    for row, y in (("top", 0), ("bottom", WHOLE // 2))
    for column, x in (("left", 0), ("right", WHOLE // 2))
}


def read_crop(text: str, brief: bool = False) -> Crop | None:
    """The crop that a turn asks for; None if it calls no tool. Raises ToolCallError if it cannot be carried out.

    With `brief` a turn that ends with "zoom top left" (or another corner) asks for that quarter as well.
    """
    call = parse_tool_call(text)
    if call is None:
        named = _BRIEF.fullmatch(text) if brief and len(text) < 1000 else None
        return QUADRANTS[f"{named[1]} {named[2]}"] if named else None
    if call.name != TOOL:
        raise ToolCallError(f"there is no tool {call.name!r}, the only one is {TOOL}")
    if call.arguments.keys() != {"x", "y", "w", "h"}:
        raise ToolCallError(f"{TOOL} takes exactly the arguments x, y, w and h")
    values = list(call.arguments.values())
    if any(isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > WHOLE for value in values):
        raise ToolCallError(f"x, y, w and h must be numbers from 0 to {WHOLE}, thousandths of the picture")
    crop = Crop(*(float(call.arguments[name]) for name in ("x", "y", "w", "h")))
    if min(crop.w, crop.h) < MIN_SIDE:
        raise ToolCallError(f"w and h must be at least {MIN_SIDE} thousandths")
    if min(crop.x, crop.y) < 0 or max(crop.x + crop.w, crop.y + crop.h) > WHOLE:
        raise ToolCallError(
            f"the crop leaves the picture: x + w and y + h must be at most {WHOLE}, and x and y at least 0"
        )
    return crop


def overview(picture: Image.Image, size: int) -> EncodedImage:
    """The whole picture, its longer side `size` pixels; as it is where it is smaller."""
    if max(picture.size) <= size:
        return EncodedImage.from_pil(picture)
    return EncodedImage.from_pil(_scaled(picture, (0, 0, picture.width, picture.height), size))


def cut(picture: Image.Image, crop: Crop, size: int) -> EncodedImage:
    """The part, its longer side `size` pixels. Raises ToolCallError for a part that is very narrow in pixels."""
    left, top = crop.x * picture.width / WHOLE, crop.y * picture.height / WHOLE
    box = (left, top, left + crop.w * picture.width / WHOLE, top + crop.h * picture.height / WHOLE)
    width, height = box[2] - box[0], box[3] - box[1]
    if max(width, height) > MAX_RATIO * min(width, height):
        raise ToolCallError(f"one side of the crop is more than {MAX_RATIO} times as long as the other")
    return EncodedImage.from_pil(_scaled(picture, box, size))


def _scaled(picture: Image.Image, box: tuple[float, float, float, float], size: int) -> Image.Image:
    """Where it gets smaller, each pixel is the mean of all that fall on it: nothing finer comes through."""
    width, height = box[2] - box[0], box[3] - box[1]
    scale = size / max(width, height)
    resampling = Image.Resampling.BOX if scale <= 1 else Image.Resampling.BICUBIC
    box = (box[0], box[1], min(box[2], picture.width), min(box[3], picture.height))  # rounding may lead beyond
    return picture.resize((max(1, round(width * scale)), max(1, round(height * scale))), resampling, box=box)
