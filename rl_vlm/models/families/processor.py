"""How a family's own processor shows images: as which tokens of a prompt, and as which tensors of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from rl_vlm.chat import mrope_positions
from rl_vlm.models.images import DEFAULT_PIXELS, Grid, UnusableImageError, decode
from rl_vlm.models.modules import from_folder
from rl_vlm.types import EncodedImage, PixelLimits, UserInputError

_SAMPLE = (64, 64)  # the size of a picture by which the text around images is found
_REMEMBERED_SIZES = 4096


class ProcessorImages:
    """The images of a model folder by its processor. What depends on an image's size alone is found with a blank one.

    placeholder: what the chat template writes for an image.
    """

    def __init__(self, processor: Any, config: Mapping[str, Any]) -> None:
        if not isinstance(placeholder := getattr(processor, "image_token", None), str):
            raise UserInputError("The model's processor names no image_token: this model cannot be shown images.")
        self._processor, self.placeholder = processor, placeholder
        self.image_token_id = int(config.get("image_token_id") or config["image_token_index"])
        rope = config.get("text_config", config).get("rope_parameters") or {}
        self.axes = 3 if "mrope_section" in rope else 1
        self._special = {number for number, token in processor.tokenizer.added_tokens_decoder.items() if token.special}
        self.size: dict[str, int] = {}
        self._sized = lru_cache(maxsize=_REMEMBERED_SIZES)(self._sized_uncached)
        ids = self._blank(*_SAMPLE)["input_ids"][0].tolist()
        marks = [number for number, token in enumerate(ids) if token in self._special]
        before, after = ids[: marks[0]], ids[marks[-1] + 1 :]
        self.around: tuple[str, str] = processor.tokenizer.decode(before), processor.tokenizer.decode(after)

    @classmethod
    def from_folder(cls, folder: Path, config: Mapping[str, Any], pixels: PixelLimits) -> ProcessorImages:
        """Of a model folder and the content of its config.json, without limits. Raises UserInputError."""
        from transformers import AutoProcessor

        if pixels != DEFAULT_PIXELS:
            raise UserInputError("model.min_pixels and model.max_pixels are for Qwen's models: set both to null.")
        try:
            return cls(from_folder(AutoProcessor, folder), config)
        except ImportError as error:
            raise UserInputError(f"The processor of {folder} cannot be loaded: {error}") from error

    def span(self, width: int, height: int, name: str = "") -> np.ndarray:
        """See ImageLayout."""
        return self._sized(width, height)[0]

    def count_tokens(self, width: int, height: int, name: str = "") -> int:
        """See ImageLayout."""
        return len(self.span(width, height))

    def num_features(self, width: int, height: int) -> int:
        """See ImageLayout."""
        return int((self.span(width, height) == self.image_token_id).sum())

    def token_grid(self, width: int, height: int) -> tuple[int, int]:
        """See ImageLayout. An image without a grid is cut into tiles, whose tokens are many grids."""
        _, grid = self._sized(width, height)
        if grid is None:
            return 0, 0
        merge = self._processor.image_processor.merge_size
        return grid[1] // merge, grid[2] // merge

    def positions(self, token_ids: np.ndarray, images: Sequence[EncodedImage]) -> np.ndarray:
        """See ImageLayout."""
        if self.axes == 1:
            return np.arange(len(token_ids))[None]
        sized = [self._sized(image.width, image.height) for image in images]
        merge = self._processor.image_processor.merge_size
        return mrope_positions(token_ids, self.image_token_id, [grid for _, grid in sized if grid], merge)

    def read(self, image: EncodedImage) -> dict[str, Any]:
        """The processor's tensors of one image, by name."""
        return self._read(decode(image, image.sha256[:12]))

    def arguments(self, images: Sequence[Image.Image]) -> dict[str, Any]:
        """See ImageLayout."""
        return dict(self._processor.image_processor([images], return_tensors="pt"))

    def shrunk(self, image: Image.Image) -> Image.Image:
        """The image itself: what the processor makes of it is not known."""
        return image

    def _read(self, image: Image.Image) -> dict[str, Any]:
        text = [self.placeholder]
        try:
            return dict(self._processor(images=[image], text=text, add_special_tokens=False, return_tensors="pt"))
        except ValueError as error:
            raise UnusableImageError(
                f"The model's processor does not take an image of {image.width}x{image.height}: {error}"
            ) from error

    def _blank(self, width: int, height: int) -> dict[str, Any]:
        return self._read(Image.new("RGB", (width, height)))

    def _sized_uncached(self, width: int, height: int) -> tuple[np.ndarray, Grid | None]:
        """The span of an image of this size, and its grid where the processor makes one."""
        inputs = self._blank(width, height)
        ids = inputs["input_ids"][0].numpy().astype(np.int32)
        marks = np.flatnonzero(np.isin(ids, list(self._special)))
        grid = inputs.get("image_grid_thw")
        return ids[marks[0] : marks[-1] + 1], None if grid is None else tuple(grid[0].tolist())
