"""Images of data sets and foreign environments: read within limits of memory and time, and changed in size."""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import cycle
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import numpy as np
from PIL import Image, UnidentifiedImageError

from rl_vlm.envs.errors import EnvError
from rl_vlm.safe_text import one_line
from rl_vlm.types import MAX_ASPECT_RATIO, EncodedImage, UserInputError, as_rgb

# Formats that PIL decodes itself; PostScript, for example, it passes to an interpreter.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
MAX_PIXELS = 64_000_000
MAX_BYTES = 64 * 2**20
GREY = (127, 127, 127)

# Ordinary progressive files have 10 scans, thoroughly optimised ones 20.
MAX_SCANS = 100
# Pixels times the components of every scan: a worst-case scan takes 3 ns for each, so that this is some 3 s of CPU.
MAX_WORK = 10**9
MAX_PARTS = 20_000  # chunks of a PNG, segments of a JPEG
MAX_FILL = 4096  # bytes without meaning between the segments of a JPEG

_SOI, _EOI, _SOS, _TEM = 0xD8, 0xD9, 0xDA, 0x01
_RESTARTS = range(0xD0, 0xD8)
# In the data of a scan: neither an escaped 0xFF, nor a restart, nor fill.
_END_OF_SCAN = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
_MARKER = re.compile(rb"\xff[^\x00\xff]")
_BASE64 = ("iVBORw0KGgo", "/9j/", "UklGR", "R0lGOD", "SUkq", "TU0A", "Qk")  # of PNG, JPEG, WEBP, GIF, TIFF (two), BMP
MAX_PATH = 100  # characters of a text that begins so and is a path; no image is shorter
_PNG = b"\x89PNG\r\n\x1a\n"

T = TypeVar("T")


class BadImageError(UserInputError):
    """An image cannot be read, or must not be.

    Do: replace the image, or lower its size; the message names it.
    """

    counted_as = "image"


def image_bytes(value: Any, folder: Path | None) -> bytes:
    """The encoded bytes of an image given as bytes, as {"bytes", "path"}, as a data URI, in base64 or as a path.

    A path, also as a file: address, is relative to `folder` and may not leave it; without a folder it is rejected, as
    remote addresses always are.
    """
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if value is None or (isinstance(value, str | bytes) and not value):
        raise BadImageError("has neither bytes nor a path")
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
    elif isinstance(value, str):
        if len(value) > MAX_PATH and value.startswith(_BASE64):
            value = f"data:;base64,{value}"
        data = _from_data_uri(value) if value[:5].lower() == "data:" else _from_path(value, folder)
    else:
        raise BadImageError(f"is a value of type {type(value).__name__}, not bytes, a path or a data URI")
    if len(data) > MAX_BYTES:
        raise BadImageError(f"has {len(data)} bytes, more than {MAX_BYTES}")
    return data


def check_header(data: bytes, max_pixels: int = MAX_PIXELS, formats: Sequence[str] = FORMATS) -> tuple[int, int]:
    """The (width, height) in an image's header; BadImageError if there is none or it has too many pixels."""
    return _open(data, max_pixels, formats).size


def decode(data: bytes, max_pixels: int = MAX_PIXELS) -> EncodedImage:
    """Decode an image whole and encode it as RGB; BadImageError if it is too large, truncated or not an image."""
    return decoded(data, EncodedImage.from_pil, max_pixels)


def pixels(data: bytes, max_pixels: int = MAX_PIXELS) -> np.ndarray:
    """Decode an image to uint8 [H, W, 3] RGB; BadImageError as `decode`."""
    return decoded(data, lambda image: np.asarray(as_rgb(image)), max_pixels)


def decoded(
    data: bytes, convert: Callable[[Image.Image], T], max_pixels: int = MAX_PIXELS, formats: Sequence[str] = FORMATS
) -> T:
    """What `convert` makes of an opened image, whose pixels it may decode; BadImageError as `decode`."""
    image = _open(data, max_pixels, formats)
    try:
        return convert(image)
    except BadImageError:
        raise
    except Exception as error:  # decoders raise nearly anything on corrupt bytes
        raise BadImageError(f"cannot be decoded ({one_line(error)})") from error


def as_image(image: Any) -> Image.Image | EncodedImage:
    """An image of an environment: PIL, an array [H, W, 3 or 4], bytes, a data URI, or the path of a local file.

    An environment is the user's own code, so its paths may point anywhere. Raises EnvError.
    """
    if isinstance(image, Image.Image | EncodedImage):
        return image
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] not in (3, 4) or image.size == 0:
            raise EnvError(f"An image array must be uint8 [height, width, 3], not {image.dtype} {list(image.shape)}.")
        return Image.fromarray(image)
    if isinstance(image, Path) or (isinstance(image, str) and "://" not in image and image[:5].lower() != "data:"):
        image = str(Path(image).absolute())
    try:
        return decode(image_bytes(image, Path("/")))
    except BadImageError as error:
        raise EnvError(f"An image of the observation {error}.") from error


@lru_cache(maxsize=256)  # the copies of a group show the same image
def fit(image: EncodedImage, size: int, square: bool = False) -> EncodedImage:
    """Shrink a larger image so that its longest side has `size` pixels.

    With `square`, every image is scaled to that size and laid on a grey square, so that all cost the same number of
    tokens.
    """
    longest = max(image.width, image.height)
    if longest <= size and not square:
        return image
    shape = tuple(max(1, round(side * size / longest)) for side in (image.width, image.height))
    smaller = image.to_pil().resize((shape[0], shape[1]), Image.Resampling.LANCZOS)
    if square:
        canvas = Image.new("RGB", (size, size), GREY)
        canvas.paste(smaller, ((size - shape[0]) // 2, (size - shape[1]) // 2))
        smaller = canvas
    return EncodedImage.from_pil(smaller)


def resized(image: EncodedImage, width: int, height: int) -> EncodedImage:
    """The image in another size, whatever that does to its proportions."""
    if (image.width, image.height) == (width, height):
        return image
    return EncodedImage.from_pil(image.to_pil().resize((width, height), Image.Resampling.LANCZOS))


@lru_cache(maxsize=64)
def blank(width: int, height: int) -> EncodedImage:
    """A grey image that shows nothing."""
    return EncodedImage.from_pil(Image.new("RGB", (width, height), GREY))


def blanked(images: Iterable[EncodedImage]) -> tuple[EncodedImage, ...]:
    return tuple(blank(image.width, image.height) for image in images)


def replaced(images: Iterable[EncodedImage], others: Sequence[EncodedImage]) -> tuple[EncodedImage, ...]:
    """`others` in the sizes of `images`: in order, again from the first if they are fewer, blank if there are none."""
    if not others:
        return blanked(images)
    return tuple(resized(there, own.width, own.height) for there, own in zip(cycle(others), images, strict=False))


def _open(data: bytes, max_pixels: int, formats: Sequence[str] = FORMATS) -> Image.Image:
    """An image whose header was read and whose pixels were not; BadImageError also if decoding would take too long."""
    scans = check_parts(data)
    try:
        image = Image.open(io.BytesIO(data), formats=tuple(formats))
    except Image.DecompressionBombError as error:
        raise BadImageError(f"has more than {max_pixels} pixels") from error
    except UnidentifiedImageError as error:
        raise BadImageError(f"is not a readable image ({', '.join(formats)})") from error
    except Exception as error:  # header parsers raise nearly anything on corrupt bytes
        raise BadImageError(f"is not a readable image ({one_line(error)})") from error
    if len(scans) > 1 and image.width * image.height * sum(scans) > MAX_WORK:
        raise BadImageError(
            f"is a JPEG of {len(scans)} scans of {image.width}x{image.height} pixels, which takes too long to decode: "
            "save it without progressive scans"
        )
    if image.format == "TIFF" and image.info.get("compression") in ("jpeg", "tiff_jpeg"):
        raise BadImageError(
            "is a TIFF that holds JPEGs, each strip of which may cost as much as the file: save it as PNG"
        )
    if image.width * image.height > max_pixels:
        raise BadImageError(f"has {image.width}x{image.height} pixels, more than {max_pixels}")
    if max(image.size) > MAX_ASPECT_RATIO * min(image.size):
        raise BadImageError(
            f"has {image.width}x{image.height} pixels, more than {MAX_ASPECT_RATIO} times longer than wide: crop it"
        )
    return image


def _from_data_uri(uri: str) -> bytes:
    """The payload of `data:<anything>;base64,<payload>`; some writers put None for the media type."""
    header, comma, payload = uri[:256].partition(",")
    if not comma or not header.lower().endswith(";base64"):
        raise BadImageError("is a data URI without ;base64,")
    if len(uri) > 2 * MAX_BYTES:
        raise BadImageError(f"is a data URI of {len(uri)} characters, more than {2 * MAX_BYTES}")
    payload = "".join(uri[len(header) + 1 :].split()).rstrip("=")
    try:
        return base64.b64decode(payload + "=" * (-len(payload) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadImageError(f"is a data URI with invalid base64 ({error})") from error


def _from_path(path: str, folder: Path | None) -> bytes:
    """The content of a file below `folder`. Names alone decide where it is, so that `..` cannot follow a link out; a
    linked folder inside is the user's own choice."""
    shown = f"is the path {path[:80]!r}"
    try:
        if path[:5].lower() == "file:":
            parts = urlsplit(path)
            path = unquote(f"{parts.netloc.removeprefix('localhost')}{parts.path}")
        if "://" in path:
            raise BadImageError(
                f"is the address {path[:80]!r}: images are never fetched, put their bytes into the data"
            )
        if folder is None:
            raise BadImageError(f"{shown}, but there is no folder that it could be relative to")
        root, real = Path(os.path.abspath(folder)), folder.resolve()
        if "\\" in path and not (root / path).exists():  # of Windows
            path = path.replace("\\", "/")
        file = Path(os.path.abspath(root / path))
        if not (file.is_relative_to(root) or file.is_relative_to(real)):
            raise BadImageError(f"{shown}, which leaves the folder {root}")
        target = file.resolve()
        if not file.is_file():
            is_text = not Path(path).suffix and "/" not in path
            advice = (
                "it looks like a text: name the column of the images" if is_text else "add it, or leave the row out"
            )
            raise BadImageError(f"{shown}, and there is no such file in {root} ({advice})")
        if not any(target.is_relative_to(place) for place in (real, file.parent.resolve())):
            raise BadImageError(f"{shown}, a link that leaves the folder {root}: copy the file, or link its folder")
        if file.stat().st_size > MAX_BYTES:
            raise BadImageError(f"has {file.stat().st_size} bytes, more than {MAX_BYTES}")
        return file.read_bytes()
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: symbolic links in a circle
        raise BadImageError(f"{shown}, which cannot be read ({one_line(error)})") from error


def check_parts(data: bytes) -> list[int]:
    """Look through the parts of a PNG or JPEG file; of a JPEG, the number of components of every scan.

    Linear in the file's size. Raises BadImageError for more parts or scans than a picture needs; what is wrong with a
    damaged file the decoder says.
    """
    if data.startswith(b"\xff\xd8"):
        return _scans(data)
    place, chunks = len(_PNG), 0
    while data.startswith(_PNG) and place + 12 <= len(data):
        place += 12 + int.from_bytes(data[place : place + 4], "big")
        chunks += 1
        if chunks > MAX_PARTS:
            raise BadImageError(f"is a PNG of more than {MAX_PARTS} chunks: save it again")
    return []


def _scans(data: bytes) -> list[int]:
    """Follows the markers as libjpeg does."""
    scans: list[int] = []
    place, segments, fill = 2, 0, 0
    while place + 1 < len(data):
        if data[place] != 0xFF or data[place + 1] in (0x00, 0xFF):
            found = _MARKER.search(data, place)
            after = found.start() if found else len(data)
            fill += after - place
            if fill > MAX_FILL and not scans:
                raise BadImageError(f"is a JPEG with more than {MAX_FILL} bytes between its segments: save it again")
            place = after
            continue
        marker = data[place + 1]
        place += 2
        if marker == _EOI:
            break
        if marker in _RESTARTS or marker in (_SOI, _TEM):
            continue
        length = int.from_bytes(data[place : place + 2], "big")
        segments += 1
        if segments > MAX_PARTS:
            raise BadImageError(f"is a JPEG of more than {MAX_PARTS} segments: save it again")
        if marker == _SOS:
            scans.append(min(max(data[place + 2], 1), 4) if place + 2 < len(data) else 1)
            if len(scans) > MAX_SCANS:
                raise BadImageError(
                    f"is a JPEG of more than {MAX_SCANS} scans, which takes too long to decode: save it without "
                    "progressive scans"
                )
            found = _END_OF_SCAN.search(data, place + length)
            place = found.start() if found else len(data)
        else:
            place += length
    return scans
