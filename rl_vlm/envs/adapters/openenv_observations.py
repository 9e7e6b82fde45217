"""From the observation of an OpenEnv server, a JSON object, to text and images."""

from __future__ import annotations

import base64
import binascii
import json
import math
from typing import Any

import numpy as np

from rl_vlm.envs.errors import EnvError
from rl_vlm.envs.images import ImageError, decode, image_bytes
from rl_vlm.types import EncodedImage

MAX_CHARS = 20_000
MAX_IMAGES = 16
_MAGIC = ("iVBORw0KGgo", "/9j/", "UklGR")  # PNG, JPEG and WebP in base64


def parts_of(observation: Any) -> tuple[list[EncodedImage], str]:
    """The images of an observation in the order of its fields, and its other fields as text.

    An image is a data URI, base64 of a PNG, JPEG or WebP file, a nested list [H][W][3], or a flat list beside a field
    `<name>_shape`. A single text stays as it is; several fields are lines "name: value", and so is a number that stands alone
    because the other fields are empty.
    """
    fields = observation if isinstance(observation, dict) else {"observation": observation}
    images: list[EncodedImage] = []
    lines: dict[str, str] = {}
    shapes = {name for name in fields if name.endswith("_shape") and name.removesuffix("_shape") in fields}
    for name, value in fields.items():
        if name in shapes or value is None or value in ("", [], {}):
            continue
        found = _images(value, fields.get(f"{name}_shape"))
        if found is not None:
            images += found
        else:
            lines[name] = value if isinstance(value, str) else json.dumps(value)
    if len(images) > MAX_IMAGES:
        raise EnvError(f"An observation has {len(images)} images, more than {MAX_IMAGES}.")
    named = [f"{name}: {one}" for name, one in lines.items()]
    alone = len(lines) == 1 and (len(fields) == 1 or isinstance(fields[next(iter(lines))], str))
    text = next(iter(lines.values())) if alone else "\n".join(named)
    if len(text) > MAX_CHARS:
        text = f"{text[:MAX_CHARS]} … ({len(text) - MAX_CHARS} characters are left out)"
    return images, text


def _images(value: Any, shape: Any) -> list[EncodedImage] | None:
    """The images that a value is; None where it is something else."""
    if isinstance(value, str):
        return [_decoded(value)] if value.startswith(("data:image/", *_MAGIC)) else None
    if not isinstance(value, list):
        return None
    if all(isinstance(one, str) for one in value):
        return (
            [_decoded(one) for one in value] if all(one.startswith(("data:image/", *_MAGIC)) for one in value) else None
        )
    pixels = _pixels(value, shape)
    return None if pixels is None else [EncodedImage.from_pil(pixels)]


def _decoded(text: str) -> EncodedImage:
    try:
        if text.startswith("data:"):
            return decode(image_bytes(text, None))
        return decode(image_bytes(base64.b64decode(text, validate=True), None))
    except (ImageError, binascii.Error, ValueError) as error:
        raise EnvError(f"An image of the observation cannot be read: {error}.") from error


def _pixels(value: list[Any], shape: Any) -> Any:
    from PIL import Image

    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        return None
    if (
        isinstance(shape, list)
        and all(isinstance(side, int) and side > 0 for side in shape)
        and math.prod(shape) == array.size
    ):
        array = array.reshape(shape)
    grey = shape is not None and array.ndim == 2
    coloured = array.ndim == 3 and array.shape[2] in (3, 4) and min(array.shape[:2]) > 3
    if array.dtype.kind != "i" or not (grey or coloured) or array.min() < 0 or array.max() > 255:
        return None
    return Image.fromarray(array.astype(np.uint8))
