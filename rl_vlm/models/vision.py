"""The vision towers of Qwen2.5-VL and Qwen3-VL, computed with fewer and larger operations than transformers does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional

from rl_vlm.models.rotary import rolled_sin, rotate


@contextlib.contextmanager
def fast_vision(model: Any, attention: bool = True) -> Iterator[None]:
    """Within this context the model's vision tower computes the same faster; without `attention` its layers as they are.

    The patch embedding is a 3-D convolution whose kernel is as large as its input, so it is a matrix product; for a still
    image one frame is enough (`frame_patches`), because its frames are equal. transformers computes attention image by
    image; for images of equal size one call computes all.
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
