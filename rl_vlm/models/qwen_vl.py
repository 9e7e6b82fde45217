"""The forward pass of Qwen's VLMs: image features, attention over packed rows, and hidden states for the learner.

The transformers engine writes the layers of the language model out in `engines/decoder.py` and takes the rest from
here: the same image features and token mask. Features are kept by the image's hash while the vision tower stays as it
is: an engine forgets them when an adapter changes the tower, and a tower that is trained is computed anew every time.
"""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import BaseModelOutputWithPooling

from rl_vlm.models.devices import wide_product
from rl_vlm.models.images import ImageProcessorSpec, ReadAhead
from rl_vlm.models.loading import HeadDType
from rl_vlm.models.memory.shape import PATCHES_AT_ONCE, PATCHES_ON_CPU
from rl_vlm.numerics import in_batches
from rl_vlm.types import EncodedImage, RLVLMError


def rolled_sin(sin: Tensor) -> Tensor:
    """The sine table [..., head_dim] for `rotate`, with rotate_half's minus sign: it maps (x1, x2) to (-x2, x1)."""
    half = sin.shape[-1] // 2
    return torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [..., head_dim] turned by the angles of cos and `rolled_sin`."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)


# Attention in which several query heads share a key head, by a kernel that does not write out all scores.


def needs_own_keys(query: Tensor) -> bool:
    """Whether every query head must be given keys and values of its own.

    Of a GPU's kernels only those for 16 bits know groups of heads: for float32 torch would write out all scores.
    """
    return query.device.type == "cuda" and query.dtype == torch.float32


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float | None = None) -> Tensor:
    """[B, heads, L, head_dim] of query, and of key and value [B, key heads, L, head_dim]; with a gradient."""
    if needs_own_keys(query):
        groups = query.shape[1] // key.shape[1]
        key, value = (side.repeat_interleave(groups, dim=1) for side in (key, value))
    return functional.scaled_dot_product_attention(
        query, key, value, is_causal=True, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )


def masked_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    """As `causal_attention`, where a mask bool [L, K] says what is seen of key and value [B, key heads, K, head_dim].

    Query heads that share a key head are passed as further queries, because keys repeated for each would be kept for
    the backward pass. Of a long sequence the repeated mask would be larger.
    """
    rows, heads, length, size = query.shape
    groups = heads // key.shape[1]
    if length > 2 * key.shape[1] * size:
        key, value = (side.repeat_interleave(groups, dim=1) for side in (key, value))
        groups = 1
    mixed = functional.scaled_dot_product_attention(
        query.reshape(rows, heads // groups, groups * length, size),
        key,
        value,
        attn_mask=mask.repeat(groups, 1)[None, None],
        scale=scale,
    )
    return mixed.reshape(rows, heads, length, size)


def last_token_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """[B, heads * head_dim] of one query per row [B, heads, head_dim], key and value [B, key heads, L, head_dim].

    mask: bool (what is seen) or a bias [B, 1, 1, L]; None where all is seen. Query heads that share a key head are
    passed as the query dimension: kernels that take a mask know no groups.
    """
    rows, key_heads, _, size = key.shape
    mixed = functional.scaled_dot_product_attention(
        query.reshape(rows, key_heads, -1, size), key, value, attn_mask=mask, scale=scale
    )
    return mixed.reshape(rows, -1)


# Attention over packed rows without a mask [B, 1, L, L]: each continuation sees the shared prompt and itself.
#
# A row's tokens are its prompt (segment 0), continuations (1, 2, ...) one after the other, and padding (-1). Prompt
# and first continuation are plain causal attention; each further continuation is a call of its own, whose keys are the
# prompt's and its own. (Flex attention takes segments as its mask, but refuses gradients on a CPU.)

NAME = "rl_vlm_segments"  # as transformers knows it


@dataclass(frozen=True, slots=True)
class Continuation:
    """A later continuation [start, stop) of a row whose prompt has `prompt` tokens."""

    prompt: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class SegmentLayout:
    """Where the continuations after the first stand, by row, and a mask that all of them share."""

    later: dict[int, list[Continuation]]
    longest_prompt: int
    mask: Tensor  # bool [longest, longest prompt + longest]: prompt, then causal

    @classmethod
    def of(cls, segments: np.ndarray, device: torch.device | str = "cpu") -> SegmentLayout:
        """From segments int [B, L] in this order."""
        later: dict[int, list[Continuation]] = {}
        for number, row in enumerate(segments):
            real = row[: int((row >= 0).sum())]
            kinds, starts = np.unique(real, return_index=True)
            ends = [*starts[1:].tolist(), len(real)]
            prompt = ends[0] if len(kinds) and kinds[0] == 0 else 0
            first = 2 if prompt else 1
            for start, stop in list(zip(starts.tolist(), ends, strict=True))[first:]:
                later.setdefault(number, []).append(Continuation(prompt, start, stop))
        every = [continuation for members in later.values() for continuation in members]
        longest = max((continuation.stop - continuation.start for continuation in every), default=0)
        longest_prompt = max((continuation.prompt for continuation in every), default=0)
        mask = torch.ones(longest, longest_prompt + longest, dtype=torch.bool, device=device)
        return cls(later, longest_prompt, mask.tril(longest_prompt))

    def pays(self, length: int, call_cost: int) -> bool:
        """Whether this is cheaper than dense masks of `length`; a further call costs as much as so many pairs."""
        saved = 0
        for members in self.later.values():
            sizes = [(one.prompt, one.stop - one.start) for one in members]
            spent = call_cost * len(members) + sum(own * (prompt + own) for prompt, own in sizes)
            saved += length**2 - members[0].start ** 2 - spent
        return saved >= 0

    def mask_of(self, continuation: Continuation) -> Tensor:
        """bool [queries, prompt + queries]: a view."""
        length = continuation.stop - continuation.start
        return self.mask[:length, self.longest_prompt - continuation.prompt : self.longest_prompt + length]


def dense_mask(segments: Tensor) -> Tensor:
    """The same as a mask bool [B, 1, L, L] of segments [B, L]: the reference."""
    length = segments.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    key, query = segments[:, None, None, :], segments[:, None, :, None]
    return causal & ((key == 0) | (key == query))


def segment_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    segments: SegmentLayout | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: [B, L, heads, head_dim] of query, key and value [B, heads, L, head_dim]; its
    own `sdpa` without `segments`. Outputs of padding are unspecified, and finite."""
    if segments is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)  # type: ignore[no-any-return]

    def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return causal_attention(query, key, value, scaling).transpose(1, 2).contiguous()

    packed = segments.later
    if not packed:
        return causal(query, key, value), None
    by_number: dict[int, Tensor] = {}
    plain = [number for number in range(len(query)) if number not in packed]
    if plain:
        by_number |= dict(zip(plain, causal(query[plain], key[plain], value[plain]), strict=True))
    for number, members in packed.items():
        query_row, key_row, value_row = query[number, None], key[number, None], value[number, None]
        first = members[0].start
        pieces = [causal(query_row[:, :, :first], key_row[:, :, :first], value_row[:, :, :first])[0]]
        for continuation in members:
            own = slice(continuation.start, continuation.stop)
            keys, values = (
                torch.cat([side[:, :, : continuation.prompt], side[:, :, own]], dim=2) for side in (key_row, value_row)
            )
            attended = masked_attention(query_row[:, :, own], keys, values, segments.mask_of(continuation), scaling)
            pieces.append(attended[0].transpose(0, 1))
        padding = query.shape[2] - members[-1].stop
        pieces.append(pieces[0].new_zeros(padding, *pieces[0].shape[1:]))
        by_number[number] = torch.cat(pieces)
    return torch.stack([by_number[number] for number in range(len(query))]), None


# The vision towers of Qwen2.5-VL and Qwen3-VL, computed with fewer and larger operations than transformers does.


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


CACHE_BYTES = 256 << 20
_VISION_PATCHES = {"cuda": PATCHES_AT_ONCE, "cpu": PATCHES_ON_CPU}
# Query-key pairs in the time of one more call of attention, forward and backward: 0.2 ms at 100 GFLOP/s on a CPU, 0.05
# ms at 200 TFLOP/s on a GPU.
_CALL_COST = {"cpu": 1 << 15, "cuda": 1 << 19}

Attention: TypeAlias = Literal["auto", "segments", "dense"]


@dataclass(slots=True)
class ImageFeatures:
    """Inputs of the language model for one image of N placeholder tokens."""

    merged: Tensor  # [N, D]
    deepstack: list[Tensor]  # [N, D] per layer

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.merged, *self.deepstack))


class Backbone:
    """Wraps a Qwen2.5-VL or Qwen3-VL model (plain, or with LoRA layers injected).

    Args:
        suppressed_ids: int64 token ids whose logits are always -inf.
        cache_bytes: of image features, beyond which the least recently used are dropped.
        head_dtype: float32 does not round logits to the model's type.
        image_by_image: no two images go through the vision tower together, so that the last bits of features do not
            depend on what else was wanted or is cached.
    """

    def __init__(
        self,
        model: nn.Module,
        images: ImageProcessorSpec,
        suppressed_ids: np.ndarray,
        cache_bytes: int = CACHE_BYTES,
        head_dtype: HeadDType = "model",
        image_by_image: bool = False,
    ) -> None:
        self.model: Any = model
        self.images = images
        self.device = next(model.parameters()).device
        vocab_size = self.lm_head.weight.shape[0]
        bias = torch.zeros(vocab_size, dtype=torch.float32)
        bias[torch.from_numpy(suppressed_ids)] = float("-inf")
        self.token_bias = bias.to(self.device)  # [V]: 0 where allowed, -inf where suppressed
        self.wide_head = head_dtype == "float32" and self.lm_head.weight.dtype != torch.float32
        self._attention: Attention = "dense"
        # Features of a tower that is trained need a gradient, and are other ones after every step.
        self.trains_tower = any(one.requires_grad for name, one in model.named_parameters() if ".visual." in name)
        self.checkpoints_tower = False  # its layers are computed again in the backward pass, after fast_vision
        self._read_ahead = ReadAhead(images)
        self._cache: OrderedDict[str, ImageFeatures] = OrderedDict()
        self._cache_bytes = cache_bytes
        self._cached_bytes = 0
        self._most_patches = 0 if image_by_image else _VISION_PATCHES[self.device.type]
        self.cache_hits = self.cache_misses = 0

    @property
    def width(self) -> int:
        """D, of the language model's hidden states."""
        return int(self.lm_head.weight.shape[1])

    @property
    def lm_head(self) -> nn.Linear:
        """The output projection [V, D]."""
        return self.model.lm_head  # type: ignore[no-any-return]

    def image_features(self, images: Sequence[EncodedImage]) -> list[ImageFeatures]:
        """Features of each image, in order; with a gradient and never cached where the tower is trained."""
        wanted = {image.sha256: image for image in images}
        missing = [image for key, image in wanted.items() if key not in self._cache]
        self.cache_misses += len(missing)
        self.cache_hits += len(images) - len(missing)
        features = {key: self._cache[key] for key in wanted if key in self._cache}
        with torch.set_grad_enabled(self.trains_tower and torch.is_grad_enabled()):
            for batch in self._vision_batches(missing):
                features |= self._encode(batch)
        if self.trains_tower:
            return [features[image.sha256] for image in images]
        for key in wanted:
            if key not in self._cache:
                self._cached_bytes += features[key].num_bytes
            self._cache[key] = features[key]
            self._cache.move_to_end(key)
        while self._cached_bytes > self._cache_bytes and self._cache:
            self._cached_bytes -= self._cache.popitem(last=False)[1].num_bytes
        return [features[image.sha256] for image in images]

    def announce_images(self, images: Sequence[EncodedImage]) -> None:
        """`image_features` is asked for these next: a thread decodes those that are not cached."""
        self._read_ahead.announce(image for image in images if image.sha256 not in self._cache)

    def forget_images(self) -> None:
        """Drop the cached features, because the vision tower changes."""
        self._cache.clear()
        self._cached_bytes = 0

    def _vision_batches(self, images: Sequence[EncodedImage]) -> Iterator[list[EncodedImage]]:
        """The images in batches of bounded size: the memory of a forward pass grows with its patches."""
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
        features = {
            image.sha256: ImageFeatures(out.pooler_output[k].clone(), [layer[k].clone() for layer in deepstack])
            for k, image in enumerate(images)
        }
        for one, grid in zip(features.values(), grids, strict=True):
            # A row for each placeholder in every layer: others would be broadcast, and the model would see nothing.
            tokens = self.images.num_image_tokens(grid)
            shapes = {tuple(tensor.shape) for tensor in (one.merged, *one.deepstack)}
            if shapes != {(tokens, self.width)}:
                raise RLVLMError(
                    f"transformers {transformers.__version__} gives an image of {tokens} tokens features of the shapes "
                    f"{shapes} in place of {(tokens, self.width)}: install a version that rl-vlm's requirements name."
                )
        return features

    def choose_attention(self, attention: Attention) -> None:
        """How the language model attends in packed rows from now on."""
        self._attention = attention
        if attention != "dense":
            AttentionInterface.register(NAME, segment_attention)
            self.model.set_attn_implementation({"text_config": NAME})

    def attention(self, segments: np.ndarray) -> Tensor | SegmentLayout:
        """What `hidden_states` takes for segments int [B, L]: 0 prompt, 1.. the continuations, -1 padding."""
        if self._attention != "dense":
            layout = SegmentLayout.of(segments, self.device)
            if self._attention == "segments" or layout.pays(segments.shape[1], _CALL_COST[self.device.type]):
                return layout
        return dense_mask(torch.from_numpy(segments).to(self.device))

    def hidden_states(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention: Tensor | SegmentLayout,
        features: Sequence[ImageFeatures] = (),
    ) -> Tensor:
        """Last hidden states [B, L, D] of input_ids int64 [B, L] at position_ids int64 [3, B, L]; attention is a mask
        bool [B, 1, L, K] or segments; features are in the row-major order of the images' placeholders."""
        dense = isinstance(attention, Tensor)
        extra: dict[str, Any] = {} if dense else {"segments": attention}
        if features:
            encoder = BaseModelOutputWithPooling(pooler_output=[f.merged for f in features])  # type: ignore[arg-type]
            layers = range(len(features[0].deepstack))
            encoder.deepstack_features = [[f.deepstack[k] for f in features] for k in layers]  # type: ignore[attr-defined]
            extra["mm_encoder_outputs"] = {"image": encoder}
        out = self.model.model(
            input_ids=input_ids,
            position_ids=position_ids,
            attention_mask=attention if dense else None,
            use_cache=False,
            **extra,
        )
        return out.last_hidden_state  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 logits [N, V] of hidden states [N, D], suppressed tokens at -inf."""
        if self.wide_head:
            return wide_product(hidden, self.lm_head.weight) + self.token_bias
        return self.lm_head(hidden).float() + self.token_bias
