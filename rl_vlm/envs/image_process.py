"""Decodes an image in a child process, with limits of time and memory: for files that may cost seconds."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from typing import Any

from PIL import Image, ImageOps

from rl_vlm.child import Answer, BusyError, Child, ChildStartError, Queue
from rl_vlm.envs.image_budget import ImageError
from rl_vlm.frames import Frame, FrameError, PeerGoneError

TIMEOUT_S = 120.0  # of one image, on a machine that is busy with other things
CPU_SECONDS = 20  # four times what the costliest file takes that is let through
MEMORY = 3 << 30  # bytes: 64 million pixels take 1.5 GiB
_MODES = ("L", "RGB", "RGBA", "CMYK", "YCbCr", "LAB")

# One at a time, so that many costly images take one core and the memory of one.
_queue = Queue(most=256, timeout_s=300.0)


def decode_in_process(
    data: bytes, formats: Sequence[str], max_pixels: int, timeout_s: float = TIMEOUT_S
) -> Image.Image:
    """The first frame, upright. Raises ImageError for a damaged image, and where the limits do not suffice."""
    try:
        with _queue.turn():
            reply, pixels = _decode(data, formats, max_pixels, timeout_s)
    except BusyError as error:
        raise ImageError(f"was not decoded, because other images are: {error}") from error
    if "error" in reply:
        raise ImageError(f"cannot be decoded ({reply['error']})")
    return Image.frombytes(reply["mode"], (reply["width"], reply["height"]), pixels[0])


def _decode(data: bytes, formats: Sequence[str], max_pixels: int, timeout_s: float) -> Frame:
    try:
        child = Child("rl_vlm.envs.image_process:prepare", memory=MEMORY, cpu_s=CPU_SECONDS)
    except OSError as error:
        raise ImageError(f"cannot be decoded, because no process could be started for it ({error})") from error
    try:
        return child.ask({"formats": list(formats), "max_pixels": max_pixels}, [data], timeout_s=timeout_s)
    except ChildStartError as error:
        raise ImageError(f"cannot be decoded: {error}") from error
    except TimeoutError as error:
        raise ImageError("takes too long to decode: save it as a plain JPEG or PNG") from error
    except (PeerGoneError, FrameError) as error:
        raise ImageError(f"broke the process that decoded it ({child.kill()})") from error
    finally:
        child.kill()


def prepare() -> Answer:
    """In the child: what answers requests."""
    with contextlib.suppress(OSError):
        os.nice(10)  # an attack on the decoder must not slow down what runs beside it
    return _answer


def _answer(request: dict[str, Any], blobs: list[bytes]) -> Frame:
    try:
        return _upright(blobs[0], request["formats"], request["max_pixels"])
    except Exception as error:  # decoders raise nearly anything on corrupt bytes
        return {"error": f"{type(error).__name__}: {error}"[:300]}, []


def _upright(data: bytes, formats: Sequence[str], max_pixels: int) -> Frame:
    """The first frame of a file, upright: its mode and size, and its raw pixels."""
    image = Image.open(io.BytesIO(data), formats=list(formats))
    if image.width * image.height > max_pixels:
        raise ValueError(f"{image.width}x{image.height} pixels are too many")
    upright: Image.Image = ImageOps.exif_transpose(image)
    if upright.mode not in _MODES:
        upright = upright.convert("RGB")
    return {"mode": upright.mode, "width": upright.width, "height": upright.height}, [upright.tobytes()]
