"""How images stand in a prompt and are read: the interface of all families, without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from PIL import Image

from rl_vlm.chat import ChatCodec, expand_image_tokens
from rl_vlm.types import EncodedImage, PixelLimits, UserInputError, as_rgb

if TYPE_CHECKING:
    from torch import Tensor

Grid = tuple[int, int, int]  # temporal, height, width in patches

DEFAULT_PIXELS = PixelLimits(None, None)


class UnusableImageError(UserInputError):
    """An image that cannot be shown to the model; the message names it.

    Do: change the image's size, or `model.min_pixels` and `model.max_pixels`.
    """

    counted_as = "image"


class ImageLayout(Protocol):
    """How images stand in a prompt, which their size alone decides, and how they are read."""

    @property
    def image_token_id(self) -> int:
        """Of the tokens whose places image features take."""

    @property
    def placeholder(self) -> str:
        """What the chat template writes for an image; empty for the text of `image_token_id`."""

    @property
    def around(self) -> tuple[str, str]:
        """Plain text before and after every image, which the tokenizer may join with the words beside it."""

    @property
    def size(self) -> dict[str, int]:
        """The argument by which a Hugging Face processor scales images as here; empty where its own does."""

    @property
    def axes(self) -> int:
        """Of positions: 3 (time, height, width) of M-RoPE, else 1."""

    def span(self, width: int, height: int, name: str = "") -> np.ndarray:
        """The token ids int32 that an image becomes; some may separate. Raises UnusableImageError, which names it."""

    def count_tokens(self, width: int, height: int, name: str = "") -> int:
        """The length of `span`."""

    def num_features(self, width: int, height: int) -> int:
        """How many of them take image features."""

    def token_grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of these features on the image; zeros where they are no grid."""

    def positions(self, token_ids: np.ndarray, images: Sequence[EncodedImage]) -> np.ndarray:
        """Rotary positions int64 [axes, T] of ids with these images' spans."""

    def read(self, image: EncodedImage) -> Any:
        """What the backbone makes features of. Raises UnusableImageError for one that cannot be decoded."""

    def arguments(self, images: Sequence[Image.Image]) -> Mapping[str, Tensor]:
        """Of the model's own forward pass, for the images of one prompt."""

    def shrunk(self, image: Image.Image) -> Image.Image:
        """An RGB image in the size that the model sees, where that is known and smaller; else the image itself."""


@dataclass(frozen=True, slots=True)
class TextSide:
    """Chat codec and image layout of one model, without its weights."""

    codec: ChatCodec
    images: ImageLayout
    vocab_size: int

    def expand(self, token_ids: np.ndarray, images: Sequence[EncodedImage], name: str = "") -> np.ndarray:
        """Encoded ids int32 with the span of each image in the place of its placeholder. Raises UserInputError."""
        spans = [self.images.span(image.width, image.height, name) for image in images]
        return expand_image_tokens(token_ids, self.codec.image_token_id, spans, name)

    def collapse(self, token_ids: np.ndarray, images: Sequence[EncodedImage]) -> np.ndarray:
        """The inverse of `expand`, of ids that may hold the first images only."""
        pieces, end = [], 0
        features = token_ids == self.images.image_token_id
        for image in images:
            span = self.images.span(image.width, image.height)
            if not features[end:].any():
                break
            start = end + int(features[end:].argmax()) - int((span == self.images.image_token_id).argmax())
            pieces += [token_ids[end:start], [self.codec.image_token_id]]
            end = start + len(span)
        return np.concatenate([*pieces, token_ids[end:]]).astype(np.int32)


def decode(image: Image.Image | EncodedImage, label: str) -> Image.Image:
    """An image as RGB and upright. Raises UnusableImageError, which names it."""
    try:
        return image.to_pil(label) if isinstance(image, EncodedImage) else as_rgb(image)
    except UserInputError as error:
        raise UnusableImageError(str(error)) from error
    except (OSError, SyntaxError, ValueError) as error:  # what PIL raises for damaged files
        raise UnusableImageError(f"Image {label} cannot be decoded ({error}): replace it.") from error


class ReadAhead:
    """Reads images for a backbone, those of the latest announcement ahead of time. One thread announces and reads."""

    def __init__(self, images: ImageLayout) -> None:
        self._images = images
        self._thread: ThreadPoolExecutor | None = None
        self._announced: dict[str, Future[Any]] = {}

    def announce(self, images: Iterable[EncodedImage]) -> None:
        """These are read next; what was announced before is forgotten."""
        wanted = {image.sha256: image for image in images}
        for key in self._announced.keys() - wanted.keys():
            self._announced.pop(key).cancel()
        for key, image in wanted.items():
            if key not in self._announced:
                if self._thread is None:
                    self._thread = ThreadPoolExecutor(1, "read-ahead")
                self._announced[key] = self._thread.submit(self._images.read, image)

    def read(self, images: Sequence[EncodedImage]) -> list[Any]:
        """What the layout reads of each image. Raises UnusableImageError for one that cannot be decoded."""
        found = []
        for image in images:
            announced = self._announced.pop(image.sha256, None)
            in_time = announced is not None and not announced.cancel()
            found.append(announced.result() if announced and in_time else self._images.read(image))
        return found
