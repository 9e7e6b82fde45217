"""The process that decodes one costly image; `rl_vlm.envs.image_process` starts it and kills it when it takes too long.

It reads the file from stdin and writes a line of JSON, `{"mode", "width", "height"}`, and the raw pixels of the first frame,
upright; or `{"error": ...}`. Its arguments are the highest number of pixels and the formats that it may read. It is started
by file name and imports nothing of this package, so that it starts fast and stays small.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import sys
from collections.abc import Sequence
from typing import Any

from PIL import Image, ImageOps

MEMORY_LIMIT = 3 << 30  # bytes of address space: 64 million pixels take 1.5 GiB
CPU_SECONDS = 20  # four times what the costliest file takes that is let through
_MODES = ("L", "RGB", "RGBA", "CMYK", "YCbCr", "LAB")


def main() -> None:
    """Decode the image on stdin."""
    with contextlib.suppress(ValueError, OSError):  # not every system has these; the deadline still holds
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    with contextlib.suppress(OSError):
        os.nice(10)  # an attack on the decoder must not slow down what runs beside it
    reply = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not mix with the reply
    try:
        head, pixels = decode(sys.stdin.buffer.read(), sys.argv[2:], int(sys.argv[1]))
    except Exception as error:  # decoders raise nearly anything on corrupt bytes
        head, pixels = {"error": f"{type(error).__name__}: {error}"[:300]}, b""
    reply.write(json.dumps(head).encode() + b"\n")
    reply.write(pixels)
    reply.flush()


def decode(data: bytes, formats: Sequence[str], max_pixels: int) -> tuple[dict[str, Any], bytes]:
    """The first frame of a file, upright: its mode and size, and its raw pixels."""
    image = Image.open(io.BytesIO(data), formats=list(formats))
    if image.width * image.height > max_pixels:
        raise ValueError(f"{image.width}x{image.height} pixels are too many")
    upright: Image.Image = ImageOps.exif_transpose(image)
    if upright.mode not in _MODES:
        upright = upright.convert("RGB")
    return {"mode": upright.mode, "width": upright.width, "height": upright.height}, upright.tobytes()


if __name__ == "__main__":
    main()
