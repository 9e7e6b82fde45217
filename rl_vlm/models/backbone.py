"""One forward pass of a VLM, shared by the transformers engine and the learner.

Both must compute the same log-probabilities, so both go through here: the same image features, the same token mask
and the same positions. Image features are computed once per image and kept by hash while the vision tower stays as it is:
an engine forgets them when an adapter changes the tower, and a tower that is trained is computed anew every time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from rl_vlm.models.devices import wide_product
from rl_vlm.models.images import ImageProcessorSpec
from rl_vlm.models.loading import HeadDType
from rl_vlm.models.memory.parts import PATCHES_AT_ONCE, PATCHES_ON_CPU
from rl_vlm.models.read_ahead import ReadAhead
from rl_vlm.models.segments import SegmentLayout, dense_mask, use_segments
from rl_vlm.models.vision import fast_vision
from rl_vlm.types import EncodedImage

CACHE_BYTES = 256 << 20
_VISION_PATCHES = {"cuda": PATCHES_AT_ONCE, "cpu": PATCHES_ON_CPU}
# Query-key pairs that are computed in the time of one more call of attention, forward and backward. By arithmetic: 0.2 ms at
# 100 GFLOP/s on a CPU, 0.05 ms at 200 TFLOP/s on a GPU.
_CALL_COST = {"cpu": 1 << 15, "cuda": 1 << 19}

Attention: TypeAlias = Literal["auto", "segments", "dense"]


@dataclass(slots=True)
class ImageFeatures:
    """Inputs of the language model for one image of N placeholder tokens: `merged` [N, D] and [N, D] per deep-stack layer."""

    merged: Tensor
    deepstack: list[Tensor]

    @property
    def num_bytes(self) -> int:
        """Memory that the features take."""
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.merged, *self.deepstack))


class Backbone:
    """Wraps a Qwen2.5-VL or Qwen3-VL model (plain, or with LoRA layers injected).

    Args:
        model: the model for conditional generation.
        images: its image geometry.
        suppressed_ids: int64 token ids whose logits are always -inf.
        cache_bytes: how much memory image features may take before the least recently used are dropped.
        head_dtype: float32 does not round logits to the model's type.
        image_by_image: no two images go through the vision tower together, so that features do not depend, in their last bits,
            on what else was wanted or is cached.
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
        self.head_dtype: HeadDType = head_dtype
        self.wide_head = head_dtype == "float32" and self.lm_head.weight.dtype != torch.float32
        self._attention: Attention = "dense"
        # A learner's tower that is trained: its features need a gradient, and are other ones after every step.
        self.trains_tower = any(
            parameter.requires_grad for name, parameter in model.named_parameters() if ".visual." in name
        )
        self.checkpoints_tower = (
            False  # its layers are computed again in the backward pass, where fast_vision has ended
        )
        self._read_ahead = ReadAhead(images)
        self._cache: OrderedDict[str, ImageFeatures] = OrderedDict()
        self._cache_bytes = cache_bytes
        self._cached_bytes = 0
        self._most_patches = 0 if image_by_image else _VISION_PATCHES[self.device.type]
        self.cache_hits = 0
        self.cache_misses = 0
        self.vision_passes = 0

    @property
    def width(self) -> int:
        """D: how wide the language model's hidden states are."""
        return int(self.lm_head.weight.shape[1])

    @property
    def lm_head(self) -> nn.Linear:
        """The output projection [V, D]."""
        return self.model.lm_head  # type: ignore[no-any-return]

    def image_features(self, images: Sequence[EncodedImage]) -> list[ImageFeatures]:
        """Features of each image, in order; images that are not cached go through the vision tower in large batches.

        With a gradient and never cached where the tower is trained.
        """
        if not self.trains_tower:
            return self._cached_features(images)
        computed: dict[str, ImageFeatures] = {}
        for batch in self._vision_batches(list({image.sha256: image for image in images}.values())):
            computed |= self._encode(batch)
            self.vision_passes += 1
        return [computed[image.sha256] for image in images]

    def announce_images(self, images: Sequence[EncodedImage]) -> None:
        """`image_features` is asked for these next: a thread decodes those that are not cached."""
        self._read_ahead.announce(image for image in images if image.sha256 not in self._cache)

    def forget_images(self) -> None:
        """Drop the cached features: the vision tower's weights are other ones from now on."""
        self._cache.clear()
        self._cached_bytes = 0

    @torch.no_grad()
    def _cached_features(self, images: Sequence[EncodedImage]) -> list[ImageFeatures]:
        wanted = {image.sha256: image for image in images}
        missing = [image for key, image in wanted.items() if key not in self._cache]
        self.cache_misses += len(missing)
        self.cache_hits += len(images) - len(missing)
        fresh: dict[str, ImageFeatures] = {}
        for batch in self._vision_batches(missing):
            fresh |= self._encode(batch)
            self.vision_passes += 1
        found = {key: fresh[key] if key in fresh else self._cache[key] for key in wanted}
        for key, features in fresh.items():
            self._cache[key] = features
            self._cached_bytes += features.num_bytes
        for key in wanted:
            self._cache.move_to_end(key)
        while self._cached_bytes > self._cache_bytes and self._cache:
            self._cached_bytes -= self._cache.popitem(last=False)[1].num_bytes
        return [found[image.sha256] for image in images]

    def _vision_batches(self, images: Sequence[EncodedImage]) -> Iterator[list[EncodedImage]]:
        """The images in batches of bounded size: the memory of a forward pass grows with its patches."""
        batch: list[EncodedImage] = []
        patches = 0
        for image in images:
            _, rows, columns = self.images.grid_thw(image.width, image.height, image.sha256[:12])
            if batch and patches + rows * columns > self._most_patches:
                yield batch
                batch, patches = [], 0
            batch.append(image)
            patches += rows * columns
        if batch:
            yield batch

    def _encode(self, images: Sequence[EncodedImage]) -> dict[str, ImageFeatures]:
        pixels, grids = zip(*self._read_ahead.read(images), strict=True)
        pixel_values = torch.from_numpy(np.concatenate(pixels)).to(self.device)
        grid_thw = torch.tensor(grids, dtype=torch.long, device=self.device)
        with fast_vision(self.model, attention=not self.checkpoints_tower):
            out = self.model.model.get_image_features(pixel_values, grid_thw, return_dict=True)
        deepstack = getattr(out, "deepstack_features", None) or []
        return {
            image.sha256: ImageFeatures(out.pooler_output[k].clone(), [layer[k].clone() for layer in deepstack])
            for k, image in enumerate(images)
        }

    def choose_attention(self, attention: Attention) -> None:
        """How packed rows are computed from now on; calls with a mask are computed as before."""
        self._attention = attention
        if attention != "dense":
            use_segments(self.model)

    def attention(self, segments: np.ndarray) -> Tensor | SegmentLayout:
        """What `hidden_states` takes for packed rows: a token sees the prompt (segment 0) and its own continuation.

        segments int [B, L]: 0 prompt, 1.. the continuations, -1 padding.
        """
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
        """Last hidden states [B, L, D].

        input_ids int64 [B, L]; position_ids int64 [3, B, L]; attention a mask bool [B, 1, L, K], or the segments of the rows
        for a model that attends by them (`use_segments`); features of the images in the row-major order of their
        placeholders.
        """
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
