"""Images cut into patches in numpy, as `Qwen2VLImageProcessor` of all Qwen-VL models does, bit by bit."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from PIL import Image

from rl_vlm.chat import ChatCodec, expand_image_tokens, mrope_positions
from rl_vlm.types import MAX_ASPECT_RATIO, EncodedImage, PixelLimits, UserInputError, as_rgb

Grid = tuple[int, int, int]  # temporal, height, width in patches
Patches = tuple[np.ndarray, Grid]  # see frame_patches

_BICUBIC = 3
DEFAULT_PIXELS = PixelLimits(None, None)


class ImageError(UserInputError):
    """An image that cannot be shown to the model; the message names it.

    Do: change the image's size, or `model.min_pixels` and `model.max_pixels`.
    """


class ImageLayout(Protocol):
    """How images stand in a prompt, which their size alone decides, and how they are read."""

    @property
    def image_token_id(self) -> int:
        """Of the tokens whose places image features take."""

    @property
    def size(self) -> dict[str, int]:
        """The argument by which a Hugging Face processor scales images as here; empty where its own does."""

    @property
    def axes(self) -> int:
        """Of positions: 3 (time, height, width) of M-RoPE, else 1."""

    def span(self, width: int, height: int, name: str = "") -> np.ndarray:
        """The token ids int32 that an image becomes; some may be separators. Raises ImageError, which names it."""

    def count_tokens(self, width: int, height: int, name: str = "") -> int:
        """The length of `span`."""

    def num_features(self, width: int, height: int) -> int:
        """How many of them take image features."""

    def token_grid(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of these features on the image; zeros where they are no grid."""

    def positions(self, token_ids: np.ndarray, images: Sequence[EncodedImage]) -> np.ndarray:
        """Rotary positions int64 [axes, T] of ids with these images' spans."""

    def read(self, image: EncodedImage) -> Any:
        """What the backbone makes features of. Raises ImageError for one that cannot be decoded."""


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


@lru_cache(maxsize=16)
def _lookup(rescale_factor: float, mean: tuple[float, ...], std: tuple[float, ...]) -> np.ndarray:
    """float32 [3, 256]: the normalised value of every byte, in the processor's own order of float32 operations."""
    values = np.broadcast_to(np.arange(256, dtype=np.float32), (3, 256))
    means, stds = (np.array(numbers, dtype=np.float32) * np.float32(1.0 / rescale_factor) for numbers in (mean, std))
    return (values - means[:, None]) / stds[:, None]


@dataclass(frozen=True, slots=True)
class ImageProcessorSpec:
    """The settings of an image processor, and how many tokens an image takes, without decoding it."""

    patch_size: int = 16
    merge_size: int = 2
    temporal_patch_size: int = 2
    min_pixels: int = 65_536
    max_pixels: int = 16_777_216
    rescale_factor: float = 1 / 255
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_token_id: int = 0
    axes: ClassVar[int] = 3

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ImageProcessorSpec:
        """From a preprocessor_config.json with either spelling of the pixel limits. Raises UserInputError."""
        size = dict(config.get("size") or {})
        minimum = config.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels")
        maximum = config.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels")
        if not minimum or not maximum:
            raise UserInputError(
                f"The image processor's config has no pixel limits (size is {size}): not a Qwen-VL one?"
            )
        steps = [config.get(step, True) for step in ("do_resize", "do_rescale", "do_normalize")]
        if not all(steps) or config.get("resample", _BICUBIC) != _BICUBIC:
            raise UserInputError("The image processor's config leaves out a step of Qwen's, or resizes in another way.")
        return cls(
            patch_size=int(config["patch_size"]),
            merge_size=int(config["merge_size"]),
            temporal_patch_size=int(config["temporal_patch_size"]),
            min_pixels=int(minimum),
            max_pixels=int(maximum),
            rescale_factor=float(config["rescale_factor"]),
            mean=tuple(float(value) for value in config["image_mean"]),
            std=tuple(float(value) for value in config["image_std"]),
        )

    @classmethod
    def from_processor(cls, processor: Any) -> ImageProcessorSpec:
        """From a Hugging Face processor or image processor."""
        return cls.from_config(getattr(processor, "image_processor", processor).to_dict())

    @classmethod
    def from_folder(cls, folder: str | Path) -> ImageProcessorSpec:
        """From a model folder, without transformers. Raises UserInputError."""
        for name in ("processor_config.json", "preprocessor_config.json"):
            path = Path(folder) / name
            if path.is_file():
                config = json.loads(path.read_text(encoding="utf-8"))
                config = config.get("image_processor", config)
                if "patch_size" in config:
                    return cls.from_config({"rescale_factor": 1 / 255, **config})
        raise UserInputError(f"{folder} holds no image processor config: is it the folder of a Qwen-VL model?")

    def limited(self, pixels: PixelLimits) -> ImageProcessorSpec:
        """With other pixel limits. Raises UserInputError for limits that no image can meet."""
        if pixels == DEFAULT_PIXELS:
            return self
        least = self.min_pixels if pixels.minimum is None else pixels.minimum
        most = self.max_pixels if pixels.maximum is None else pixels.maximum
        if not self.factor**2 <= most or least > most:
            raise UserInputError(
                f"Images of {least} to {most} pixels: model.max_pixels must be at least model.min_pixels and "
                f"{self.factor}² = {self.factor**2} pixels."
            )
        return replace(self, min_pixels=least, max_pixels=most)

    @property
    def size(self) -> dict[str, int]:
        """The pixel limits by the processor's names for them."""
        return {"shortest_edge": self.min_pixels, "longest_edge": self.max_pixels}

    @property
    def factor(self) -> int:
        """Width and height are multiples of this many pixels."""
        return self.patch_size * self.merge_size

    def resized(self, width: int, height: int, name: str = "") -> tuple[int, int]:
        """(width, height) after Qwen's "smart resize". Raises ImageError, which names the image."""
        label = name or f"of {width}x{height} pixels"
        if width < 1 or height < 1:
            raise ImageError(f"Image {label} is empty ({width}x{height} pixels): remove it from the data.")
        if max(width, height) / min(width, height) > MAX_ASPECT_RATIO:
            raise ImageError(
                f"Image {label} ({width}x{height} pixels) is more than {MAX_ASPECT_RATIO} times longer than wide: "
                "crop it."
            )
        factor = self.factor
        new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
        if new_height * new_width > self.max_pixels:
            beta = math.sqrt((height * width) / self.max_pixels)
            new_height = max(factor, math.floor(height / beta / factor) * factor)
            new_width = max(factor, math.floor(width / beta / factor) * factor)
        elif new_height * new_width < self.min_pixels:
            beta = math.sqrt(self.min_pixels / (height * width))
            new_height = math.ceil(height * beta / factor) * factor
            new_width = math.ceil(width * beta / factor) * factor
        return new_width, new_height

    def grid_thw(self, width: int, height: int, name: str = "") -> Grid:
        """The patch grid (1, rows, columns) of an image of this size."""
        new_width, new_height = self.resized(width, height, name)
        return 1, new_height // self.patch_size, new_width // self.patch_size

    def num_image_tokens(self, grid: Grid) -> int:
        """How many placeholder tokens an image with this grid takes in the prompt."""
        temporal, rows, columns = grid
        return temporal * rows * columns // self.merge_size**2

    def count_tokens(self, width: int, height: int, name: str = "") -> int:
        """How many placeholder tokens an image of this size takes."""
        return self.num_image_tokens(self.grid_thw(width, height, name))

    num_features = count_tokens

    def token_grid(self, width: int, height: int) -> tuple[int, int]:
        """See ImageLayout."""
        _, rows, columns = self.grid_thw(width, height)
        return rows // self.merge_size, columns // self.merge_size

    def span(self, width: int, height: int, name: str = "") -> np.ndarray:
        """The placeholder tokens of an image of this size."""
        return np.full(self.count_tokens(width, height, name), self.image_token_id, dtype=np.int32)

    def positions(self, token_ids: np.ndarray, images: Sequence[EncodedImage]) -> np.ndarray:
        """See `mrope_positions`."""
        grids = [self.grid_thw(image.width, image.height) for image in images]
        return mrope_positions(token_ids, self.image_token_id, grids, self.merge_size)

    def read(self, image: EncodedImage) -> Patches:
        """See `frame_patches`."""
        return frame_patches(self, image)


def patchify(spec: ImageProcessorSpec, image: Image.Image | EncodedImage, name: str = "") -> tuple[np.ndarray, Grid]:
    """(pixel_values float32 [patches, values of a patch], grid) of one image, in the processor's patch order."""
    values, grid = frame_patches(spec, image, name)
    frames = np.repeat(values.reshape(len(values), 3, 1, -1), spec.temporal_patch_size, axis=2)
    return frames.reshape(len(values), -1), grid


def frame_patches(
    spec: ImageProcessorSpec, image: Image.Image | EncodedImage, name: str = ""
) -> tuple[np.ndarray, Grid]:
    """`patchify` with one frame instead of `temporal_patch_size` equal ones: float32 [patches, 3 * patch_size²]."""
    label = name or (image.sha256[:12] if isinstance(image, EncodedImage) else "")
    if isinstance(image, Image.Image):
        image = decode(image, label)  # upright: its size is that of what is seen
    # Checked before decoding: a forged size must not cost memory.
    new_width, new_height = spec.resized(image.width, image.height, label)
    pixels = np.asarray(decode(image, label))
    if pixels.shape[:2] != (new_height, new_width):
        pixels = _resize(pixels, new_height, new_width)
    patch, merge = spec.patch_size, spec.merge_size
    rows, columns = new_height // patch, new_width // patch
    blocks = pixels.reshape(rows // merge, merge, patch, columns // merge, merge, patch, 3)
    # -> [row block, column block, row in block, column in block, channel, y, x], still bytes: cheap to move
    patches = np.ascontiguousarray(blocks.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(rows * columns, 3, patch * patch)
    table = _lookup(spec.rescale_factor, spec.mean, spec.std)
    values = np.empty(patches.shape, dtype=np.float32)
    for channel in range(3):
        values[:, channel] = table[channel][patches[:, channel]]
    return values.reshape(rows * columns, -1), (1, rows, columns)


def shrunk(spec: ImageProcessorSpec, image: Image.Image, name: str = "") -> Image.Image:
    """An RGB image as the processor would make it where that is smaller, else the image itself."""
    size = spec.resized(image.width, image.height, name)
    if size[0] * size[1] >= image.width * image.height or spec.resized(*size, name) != size:
        return image
    return Image.fromarray(_resize(np.array(image), size[1], size[0]))


def decode(image: Image.Image | EncodedImage, label: str) -> Image.Image:
    """An image as RGB and upright. Raises ImageError, which names it."""
    try:
        return image.to_pil(label) if isinstance(image, EncodedImage) else as_rgb(image)
    except UserInputError as error:
        raise ImageError(str(error)) from error
    except (OSError, SyntaxError, ValueError) as error:  # what PIL raises for damaged files
        raise ImageError(f"Image {label} cannot be decoded ({error}): replace it.") from error


def _resize(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize as the processor does, which calls torchvision: with antialiasing, on bytes."""
    import torch

    writable = pixels if pixels.flags.writeable else np.array(pixels)  # torch warns of others
    tensor = torch.from_numpy(writable).permute(2, 0, 1).contiguous()[None]
    # What torchvision calls, whose import takes seconds and 200 MB.
    resized = torch.nn.functional.interpolate(tensor, (height, width), mode="bicubic", antialias=True)
    return np.ascontiguousarray(resized[0].permute(1, 2, 0).numpy())


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
        """What the layout reads of each image. Raises ImageError for one that cannot be decoded."""
        found = []
        for image in images:
            announced = self._announced.pop(image.sha256, None)
            in_time = announced is not None and not announced.cancel()
            found.append(announced.result() if announced and in_time else self._images.read(image))
        return found
