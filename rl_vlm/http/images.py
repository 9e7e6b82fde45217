"""Images from data URIs: the header is checked before a pixel is decoded."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from PIL import ExifTags, Image

from rl_vlm.config import HTTPSection
from rl_vlm.envs.images import ImageError, open_image, upright
from rl_vlm.models.images import ImageProcessorSpec, shrunk
from rl_vlm.types import EncodedImage, UserInputError, as_rgb

_FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG", "image/jpg": "JPEG", "image/webp": "WEBP", "image/gif": "GIF"}
_ORIENTATION = ExifTags.Base.Orientation
_FILE = "rl_vlm.file"  # key of an opened image's info: the bytes that it was opened from


class ImageReader:
    """Reads the images of requests.

    Args:
        limits: the server's.
        spec: the model's image processor; tells how many tokens an image takes.
    """

    def __init__(self, limits: HTTPSection, spec: ImageProcessorSpec) -> None:
        self._limits = limits
        self._spec = spec
        low, high = limits.resize_min_pixels, limits.resize_max_pixels
        self._resize = (
            replace(spec, min_pixels=low or spec.min_pixels, max_pixels=high or spec.max_pixels, do_resize=True)
            if low or high
            else None
        )

    def open(self, uri: str, name: str) -> Image.Image:
        """The image of a data URI; its header is within the limits, its pixels are not decoded. Raises UserInputError.

        `name` is the image's number in the request, for the message.
        """
        data, kind = self._bytes(uri, name)
        with _explained(name, f"is not a {kind} image, or is damaged"):
            image = open_image(data, [kind])
            image.info[_FILE] = data
        if image.width * image.height > self._limits.max_image_pixels:
            raise UserInputError(
                f"Image {name} ({image.width}x{image.height}) has too many pixels, more than {self._limits.max_image_pixels}: shrink it."
            )
        self.num_tokens(image, name)
        return image

    def num_tokens(self, image: Image.Image, name: str) -> int:
        """How many tokens of the prompt the image will take. Raises UserInputError for one that the model cannot see."""
        width, height = image.size
        if self._resize is not None:
            width, height = self._resize.resized(width, height, name)
        return self._spec.num_image_tokens(self._spec.grid_thw(width, height, name))

    def decode(self, image: Image.Image, name: str) -> EncodedImage:
        """Decode an opened image: the first frame, upright as its EXIF says, RGB, resized where the server is told to."""
        with _explained(name, "is damaged and cannot be decoded"):
            turned = upright(image, image.info[_FILE], self._limits.max_image_pixels)
            if self._resize is not None:
                size = self._resize.resized(turned.width, turned.height, name)
                if size != turned.size:
                    turned = EncodedImage.from_pil(turned).to_pil().resize(size, Image.Resampling.BICUBIC)
                    return EncodedImage.from_pil(turned)
            width, height = self._spec.resized(turned.width, turned.height, name)
            if width * height < turned.width * turned.height:
                # The model sees a photo smaller: as PNG in full size it would take ten times its file.
                return EncodedImage.from_pil(shrunk(self._spec, as_rgb(turned), name))
            return _as_sent(image) or EncodedImage.from_pil(turned)

    def _bytes(self, uri: str, name: str) -> tuple[bytes, str]:
        """The file inside a data URI, and PIL's name of its format."""
        head, comma, encoded = uri.partition(",")
        if head[:5].lower() != "data:" or not comma:
            raise UserInputError(
                f"Image {name} must be a data URI (data:image/png;base64,...): this server fetches neither files nor addresses."
            )
        mime, *parameters = head[5:].lower().split(";")
        kind = _FORMATS.get(mime.strip())
        if kind is None or "base64" not in (parameter.strip() for parameter in parameters):
            raise UserInputError(
                f"Image {name} must be a base64 data URI of image/png, image/jpeg, image/webp or image/gif."
            )
        limit = self._limits.max_image_mib * 2**20
        if len(encoded) * 3 / 4 > limit + 3:
            raise UserInputError(
                f"Image {name} is larger than {self._limits.max_image_mib:g} MiB: send a smaller file."
            )
        try:
            return base64.b64decode("".join(encoded.split()), validate=True), kind
        except (binascii.Error, ValueError) as error:  # ValueError: characters beyond ASCII
            raise UserInputError(f"Image {name} is not valid base64: it may have been cut off.") from error


@contextmanager
def _explained(name: str, otherwise: str) -> Iterator[None]:
    """Turn what a decoder raises into UserInputError; damaged data raise almost anything: OSError, SyntaxError, struct.error, ..."""
    try:
        yield
    except ImageError as error:
        raise UserInputError(f"Image {name} {error}.") from error
    except UserInputError:
        raise
    except Image.DecompressionBombError as error:
        raise UserInputError(f"Image {name} has too many pixels: shrink it.") from error
    except Exception as error:
        raise UserInputError(f"Image {name} {otherwise}: send another one.") from error


def _as_sent(image: Image.Image) -> EncodedImage | None:
    """The file itself if it is a plain RGB PNG, which need not be encoded again: encoding is the most expensive step."""
    plain = image.format == "PNG" and image.mode == "RGB" and getattr(image, "n_frames", 1) == 1
    if not plain or "transparency" in image.info or _ORIENTATION in image.getexif():
        return None
    data: bytes = image.info[_FILE]
    return EncodedImage(hashlib.sha256(data).hexdigest(), data, image.width, image.height)
