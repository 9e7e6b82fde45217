"""Qwen's towers and language models, computed with fewer and larger operations than transformers does."""

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
from rl_vlm.models.attention import causal_attention, last_token_attention
from rl_vlm.models.families.generic import Backbone, ImageFeatures, KeysValues
from rl_vlm.models.families.qwen_vl import PATCHES_AT_ONCE, WRITTEN_OUT, ImageProcessorSpec
from rl_vlm.models.kernels import rms_norm
from rl_vlm.models.modules import text_model
from rl_vlm.types import EncodedImage, UserInputError

_STATIC_ROPE = ("default", "linear", "yarn")  # frequencies that do not depend on the length of the sequence


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
        for module in text_model(self.model).modules() if self.model.config.model_type in WRITTEN_OUT.types else ():
            if hasattr(module, "variance_epsilon"):
                module.forward = partial(rms_norm, module)
        self._most_patches = 0 if self.image_by_image else PATCHES_AT_ONCE.get(self.device.type, 0)

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


class TextModel:
    """The language model of a Qwen2.5-VL or Qwen3-VL, written out for generation, without gradients.

    transformers' modules spend much time outside arithmetic: masks, positions in three axes, keys and values repeated
    for every query head, cache objects, and a last layer of prompt tokens whose output is not used. Weights are read
    through the model's modules, so adapters and quantised layers are included. `cache` is the engine's `RowCache`.

    A sampled token's rotary position has one value, below `max_positions`: text advances all three axes together.
    """

    pads = True  # prompts of several lengths may share a forward pass

    def __init__(self, backbone: Backbone, max_positions: int) -> None:
        self.parts_done = 0  # halves of layers, so that a long forward pass does not look like one that hangs
        self._text, self._image_token_id = backbone.text, backbone.images.image_token_id
        rope = self._text.config.rope_parameters["rope_type"]
        if rope not in _STATIC_ROPE:
            raise UserInputError(
                f"The model's rotary positions are of type {rope!r}; this engine knows {', '.join(_STATIC_ROPE)}: "
                "use engine vllm."
            )
        weight = self._text.norm.weight
        positions = torch.arange(max_positions, device=weight.device).expand(3, 1, -1)
        with torch.inference_mode():
            cos, sin = self._text.rotary_emb(weight.new_zeros(1), positions)
            self._cos, self._sin = cos[0, :, None], rolled_sin(sin[0, :, None])  # [max_positions, 1, head_dim]

    def step(self, token_ids: Tensor, positions: Tensor, cache: Any) -> Tensor:
        """Last hidden states [R, D] of token_ids int64 [R] at rotary positions int64 [R]; the cache grows by one."""
        cos, sin = self._cos[positions], self._sin[positions]
        hidden = self._text.embed_tokens(token_ids)
        for number, layer in enumerate(self._text.layers):
            attention = layer.self_attn
            normed = rms_norm(layer.input_layernorm, hidden)
            keys, values = _keys(attention, normed, cos, sin), _split(attention, attention.v_proj(normed))
            mixed = cache.attend(number, _queries(attention, normed, cos, sin), keys, values, attention.scaling)
            self.parts_done += 1
            hidden = _feed_forward(layer, hidden + attention.o_proj(mixed))
            self.parts_done += 1
        return rms_norm(self._text.norm, hidden)

    def prefill(
        self, input_ids: Tensor, positions: Tensor, lengths: Tensor, features: Sequence[ImageFeatures] = ()
    ) -> tuple[Tensor, KeysValues]:
        """Last hidden states [B, D] of each prompt's last token, and per layer keys and values [B, heads, L, head_dim].

        input_ids int64 [B, L], padded on the right; positions int64 [3, B, L]; lengths int64 [B] without padding;
        features in the row-major order of the images' placeholders.
        """
        text, (rows, longest) = self._text, input_ids.shape
        cos, sin = text.rotary_emb(text.norm.weight.new_zeros(1), positions)
        cos, sin = cos.flatten(0, 1)[:, None], rolled_sin(sin.flatten(0, 1))[:, None]  # [B * L, 1, head_dim]
        hidden = text.embed_tokens(input_ids.flatten())  # [B * L, D]
        places = (input_ids.flatten() == self._image_token_id).nonzero().squeeze(1)
        if features:
            hidden.index_copy_(0, places, torch.cat([f.merged for f in features]).to(hidden.dtype))
        stored: KeysValues = []
        num_layers, num_deepstack = len(text.layers), len(features[0].deepstack) if features else 0
        last = torch.arange(rows, device=lengths.device) * longest + lengths - 1
        for number, layer in enumerate(text.layers):
            attention, mask = layer.self_attn, None
            normed = rms_norm(layer.input_layernorm, hidden)
            keys, values = _keys(attention, normed, cos, sin), _split(attention, attention.v_proj(normed))
            keys, values = (part.view(rows, longest, *part.shape[1:]).transpose(1, 2) for part in (keys, values))
            stored.append((keys, values))
            if number == num_layers - 1 and number >= num_deepstack:
                # The last layer's output is used for each prompt's last token only.
                hidden, normed, cos, sin = hidden[last], normed[last], cos[last], sin[last]
                mask = (torch.arange(longest, device=lengths.device) < lengths[:, None])[:, None, None]
            queries = _queries(attention, normed, cos, sin)
            if mask is not None:
                mixed = last_token_attention(queries, keys, values, mask, attention.scaling)
            else:  # causal, and so no token of a prompt sees the padding
                queries = queries.view(rows, -1, *queries.shape[1:]).transpose(1, 2)
                mixed = causal_attention(queries, keys, values, attention.scaling)
                mixed = mixed.transpose(1, 2).reshape(len(hidden), -1)
            self.parts_done += 1
            hidden = _feed_forward(layer, hidden + attention.o_proj(mixed))
            self.parts_done += 1
            if number < num_deepstack:
                hidden.index_add_(0, places, torch.cat([f.deepstack[number] for f in features]).to(hidden.dtype))
        return rms_norm(text.norm, hidden if len(hidden) == rows else hidden[last]), stored


def _split(attention: Any, projected: Tensor) -> Tensor:
    return projected.view(len(projected), -1, attention.head_dim)  # [N, heads, head_dim]


def _queries(attention: Any, normed: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _rotated(_split(attention, attention.q_proj(normed)), getattr(attention, "q_norm", None), cos, sin)


def _keys(attention: Any, normed: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _rotated(_split(attention, attention.k_proj(normed)), getattr(attention, "k_norm", None), cos, sin)


def _rotated(heads: Tensor, norm: Any, cos: Tensor, sin: Tensor) -> Tensor:
    # Qwen3 normalises queries and keys, Qwen2.5 does not.
    return rotate(heads if norm is None else rms_norm(norm, heads), cos, sin)


def _feed_forward(layer: Any, hidden: Tensor) -> Tensor:
    mlp, normed = layer.mlp, rms_norm(layer.post_attention_layernorm, hidden)
    return hidden + mlp.down_proj(mlp.act_fn(mlp.gate_proj(normed)) * mlp.up_proj(normed))
