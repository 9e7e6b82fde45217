"""Qwen's vision-language models: their towers computed with fewer and larger operations than transformers does."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers.modeling_outputs import BaseModelOutputWithPooling

from rl_vlm.batches import in_batches
from rl_vlm.models.families import WRITTEN_OUT, text_model
from rl_vlm.models.families.generic import Backbone, ImageFeatures
from rl_vlm.models.images import ImageProcessorSpec
from rl_vlm.models.kernels import rms_norm
from rl_vlm.models.memory.shape import PATCHES_AT_ONCE, PATCHES_ON_CPU
from rl_vlm.types import EncodedImage

_VISION_PATCHES = {"cuda": PATCHES_AT_ONCE, "cpu": PATCHES_ON_CPU}


def rolled_sin(sin: Tensor) -> Tensor:
    """The sine table [..., head_dim] for `rotate`, with rotate_half's minus sign: it maps (x1, x2) to (-x2, x1)."""
    half = sin.shape[-1] // 2
    return torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., head_dim] turned by the angles of cos and `rolled_sin`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


@contextlib.contextmanager
def fast_vision(model: Any, attention: bool = True) -> Iterator[None]:
    """Inside, the model's vision tower computes the same faster; without `attention` only its patch embedding.

    That is a 3-D convolution with a kernel as large as its input: a matrix product, for which one frame of a still
    image is enough (`frame_patches`). Attention is one call for all images of equal size, not one for each.
    """
    embed = model.model.visual.patch_embed
    attentions = [block.attn for block in model.model.visual.blocks] if attention else []

    def patches(pixels: Tensor) -> Tensor:
        weight = embed.proj.weight  # [D, channels, frames, height, width]
        one_frame = pixels.shape[1] * weight.shape[2] == weight[0].numel()
        kernel = (weight.sum(2) if one_frame else weight).flatten(1)
        return functional.linear(pixels.to(weight.dtype), kernel, embed.proj.bias)

    def attend(attention: Any, hidden: Tensor, cu_seqlens: Tensor, position_embeddings: Any, **kwargs: Any) -> Tensor:
        lengths = cu_seqlens.diff()
        if not bool((lengths == lengths[0]).all()):
            return type(attention).forward(attention, hidden, cu_seqlens, position_embeddings, **kwargs)  # type: ignore[no-any-return]
        queries, keys, values = attention.qkv(hidden).reshape(len(hidden), 3, attention.num_heads, -1).unbind(1)
        cos, sin = position_embeddings[0][:, None].float(), rolled_sin(position_embeddings[1])[:, None].float()
        queries, keys = (rotate(part.float(), cos, sin).to(part.dtype) for part in (queries, keys))
        shape = (len(lengths), -1, attention.num_heads, attention.head_dim)  # [images, patches, heads, head_dim]
        queries, keys, values = (part.reshape(shape).transpose(1, 2) for part in (queries, keys, values))
        mixed = functional.scaled_dot_product_attention(queries, keys, values, scale=attention.scaling)
        return attention.proj(mixed.transpose(1, 2).reshape(len(hidden), -1))  # type: ignore[no-any-return]

    embed.forward = patches
    for one in attentions:
        one.forward = partial(attend, one)
    try:
        yield
    finally:
        for module in (embed, *attentions):
            del module.forward


class QwenBackbone(Backbone):
    """Several images at once go through the tower, and features of its earlier layers into the language model's."""

    images: ImageProcessorSpec

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        for module in text_model(self.model).modules() if self.model.config.model_type in WRITTEN_OUT else ():
            if hasattr(module, "variance_epsilon"):
                module.forward = partial(rms_norm, module)
        self._most_patches = 0 if self.image_by_image else _VISION_PATCHES.get(self.device.type, 0)

    def _vision_batches(self, images: Sequence[EncodedImage]) -> Iterable[Sequence[EncodedImage]]:
        grids = [self.images.grid_thw(image.width, image.height, image.sha256[:12]) for image in images]
        sized = zip(images, map(math.prod, grids), strict=True)
        batches = in_batches(sized, lambda few, one: sum(size for _, size in few) + one[1] <= self._most_patches)
        return ([image for image, _ in batch] for batch in batches)

    def _encode(self, images: Sequence[EncodedImage]) -> dict[str, ImageFeatures]:
        pixels, grids = zip(*self._read_ahead.read(images), strict=True)
        pixel_values = torch.from_numpy(np.concatenate(pixels)).to(self.device)
        grid_thw = torch.tensor(grids, dtype=torch.long, device=self.device)
        with fast_vision(self.model, attention=not self.checkpoints_tower):
            out = self.model.model.get_image_features(pixel_values, grid_thw, return_dict=True)
        deepstack = getattr(out, "deepstack_features", None) or []
        return {
            image.sha256: self.checked(
                image, ImageFeatures(out.pooler_output[k].clone(), [layer[k].clone() for layer in deepstack])
            )
            for k, image in enumerate(images)
        }

    def run(self, input_ids: Tensor, position_ids: Tensor, features: Sequence[ImageFeatures], **options: Any) -> Any:
        if features:
            encoder = BaseModelOutputWithPooling(pooler_output=[one.merged for one in features])  # type: ignore[arg-type]
            layers = range(len(features[0].deepstack))
            encoder.deepstack_features = [[one.deepstack[k] for one in features] for k in layers]  # type: ignore[attr-defined]
            options["mm_encoder_outputs"] = {"image": encoder}
        return self.model.model(input_ids=input_ids, position_ids=position_ids, **options)
