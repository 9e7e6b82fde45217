"""Qwen's vision-language models: their images, shapes and LoRA layers. Without torch; `qwen_fast.py` computes them.

Images are cut into patches in numpy as `Qwen2VLImageProcessor` does, bit by bit.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from PIL import Image

from rl_vlm.chat import mrope_positions
from rl_vlm.models.families.family import Family
from rl_vlm.models.images import DEFAULT_PIXELS, Grid, UnusableImageError, decode
from rl_vlm.models.memory.shape import ModelShape, TextShape, TowerShape
from rl_vlm.types import MAX_ASPECT_RATIO, EncodedImage, PixelLimits, UserInputError

if TYPE_CHECKING:
    from torch import Tensor

Patches = tuple[np.ndarray, Grid]  # see frame_patches

# Patches per pass of the vision tower: 8 million pixels on a GPU; on a CPU what fits into its caches.
PATCHES_AT_ONCE = {"cuda": 32_768, "cpu": 2_048}
_BICUBIC = 3


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
    placeholder: ClassVar[str] = ""
    around: ClassVar[tuple[str, str]] = "", ""

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
        """(width, height) after Qwen's "smart resize". Raises UnusableImageError, which names the image."""
        label = name or f"of {width}x{height} pixels"
        if width < 1 or height < 1:
            raise UnusableImageError(f"Image {label} is empty ({width}x{height} pixels): remove it from the data.")
        if max(width, height) / min(width, height) > MAX_ASPECT_RATIO:
            raise UnusableImageError(
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

    def arguments(self, images: Sequence[Image.Image]) -> dict[str, Tensor]:
        """See ImageLayout."""
        import torch

        patches, grids = zip(*(patchify(self, image) for image in images), strict=True)
        return {"pixel_values": torch.from_numpy(np.concatenate(patches)), "image_grid_thw": torch.tensor(grids)}

    def shrunk(self, image: Image.Image) -> Image.Image:
        """See ImageLayout."""
        size = self.resized(image.width, image.height)
        if size[0] * size[1] >= image.width * image.height or self.resized(*size) != size:
            return image
        return Image.fromarray(_resize(np.array(image), size[1], size[0]))


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


def _resize(pixels: np.ndarray, height: int, width: int) -> np.ndarray:
    """Resize as the processor does, which calls torchvision: with antialiasing, on bytes."""
    import torch

    writable = pixels if pixels.flags.writeable else np.array(pixels)  # torch warns of others
    tensor = torch.from_numpy(writable).permute(2, 0, 1).contiguous()[None]
    # What torchvision calls, whose import takes seconds and 200 MB.
    resized = torch.nn.functional.interpolate(tensor, (height, width), mode="bicubic", antialias=True)
    return np.ascontiguousarray(resized[0].permute(1, 2, 0).numpy())


def read_layout(folder: Path, config: Mapping[str, Any], pixels: PixelLimits) -> ImageProcessorSpec:
    """The images of a model folder. Raises UserInputError."""
    spec = ImageProcessorSpec.from_folder(folder).limited(pixels)
    return replace(spec, image_token_id=int(config["image_token_id"]))


def read_shape(config: Mapping[str, Any]) -> ModelShape:
    """The shape of a Qwen2.5-VL or Qwen3-VL."""
    older = config["model_type"] == "qwen2_5_vl"
    text = config.get("text_config", config)  # older folders have the language model's settings at the top
    heads = text["num_attention_heads"]
    known: dict[str, Any] = {"num_key_value_heads": heads, "head_dim": text["hidden_size"] // heads}
    known |= {name: value for name, value in text.items() if value is not None}
    known |= {"head_norms": not older} | ({"attention_bias": True} if older else {})
    return ModelShape(
        str(config["model_type"]),
        TextShape.model_validate(known),
        TowerShape.model_validate({**config["vision_config"], "gated": older}),
        bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
    )


QWEN = Family(
    ("qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
    tokenizer="Qwen2Tokenizer",
    layout=read_layout,
    backbone="rl_vlm.models.families.qwen_fast:QwenBackbone",
    image_tokens=16_384,
)
# Those whose shapes follow from config.json, and whose language model is written out.
WRITTEN_OUT = replace(
    QWEN,
    types=("qwen2_5_vl", "qwen3_vl"),
    text_model="rl_vlm.models.families.qwen_fast:TextModel",
    shape=read_shape,
    # The patch embedding is a convolution and is not adapted.
    lora_tower=(
        r".*visual\.(blocks|merger|deepstack_merger_list)\.(.*\.)?"
        r"(qkv|proj|gate_proj|up_proj|down_proj|linear_fc1|linear_fc2|mlp\.0|mlp\.2)"
    ),
)
