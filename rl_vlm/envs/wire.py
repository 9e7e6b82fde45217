"""Observations and arguments as the content of frames between an environment's process and the one that plays it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from PIL import Image

from rl_vlm.frames import FrameError
from rl_vlm.types import EncodedImage, Message, Observation, UserInputError

MAX_SIDE = 2**16  # pixels


def check_plain(env_id: str, arguments: Mapping[str, Any]) -> None:
    """Raise UserInputError for an argument that is no JSON, so that the process of an environment could not be told it."""
    for name, value in arguments.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise UserInputError(
                f"{env_id}: env.kwargs.{name} must be plain values to reach another process ({error}): quote dates, and write sets as "
                "lists."
            ) from error


def pack_observation(observation: Observation) -> tuple[list[dict[str, Any]], list[bytes]]:
    """An observation as JSON and the PNG bytes of its images."""
    messages: list[dict[str, Any]] = []
    blobs: list[bytes] = []
    for message in observation.messages:
        parts: list[Any] = []
        for part in message.parts:
            if isinstance(part, str):
                parts.append(part)
                continue
            image = EncodedImage.from_pil(part) if isinstance(part, Image.Image) else part
            parts.append({"width": image.width, "height": image.height})
            blobs.append(image.png)
        messages.append({"role": message.role, "parts": parts})
    return messages, blobs


def unpack_observation(messages: Any, blobs: list[bytes]) -> Observation:
    """The inverse of `pack_observation`; FrameError if the two do not fit together."""
    left = iter(blobs)
    try:
        return Observation(
            tuple(
                Message(message["role"], tuple(_unpack_part(part, left) for part in message["parts"]))
                for message in messages
            )
        )
    except (TypeError, KeyError, StopIteration, RuntimeError, AttributeError) as error:
        raise FrameError(f"an observation does not fit its images ({error})") from error


def _unpack_part(part: Any, blobs: Any) -> str | EncodedImage:
    if isinstance(part, str):
        return part
    png, width, height = next(blobs), part["width"], part["height"]
    if not all(type(side) is int and 1 <= side <= MAX_SIDE for side in (width, height)):
        raise TypeError(f"an image of {str(width)[:20]} x {str(height)[:20]} pixels")
    return EncodedImage(hashlib.sha256(png).hexdigest(), png, width, height)
