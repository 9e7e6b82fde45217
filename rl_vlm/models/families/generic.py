"""The forward pass of any model in transformers' form: image features, hidden states for the learner, and logits.

Features are kept by the image's hash while the vision tower stays as it is: an engine forgets them when an adapter
changes the tower, and a tower that is trained is computed anew every time.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface

from rl_vlm.models.attention import NAME, SegmentLayout, dense_mask, segment_attention, takes_sequences
from rl_vlm.models.images import ImageLayout, ReadAhead
from rl_vlm.models.kernels import wide_product
from rl_vlm.models.modules import HeadDType, recurrent_layers, text_model, towers
from rl_vlm.models.recurrence import share_states
from rl_vlm.types import EncodedImage, RLVLMError

CACHE_BYTES = 256 << 20
# Query-key pairs in the time of one more call of attention, forward and backward: 0.2 ms at 100 GFLOP/s on a CPU, 0.05
# ms at 200 TFLOP/s on a GPU.
_CALL_COST = {"cpu": 1 << 15, "cuda": 1 << 19}

KeysValues: TypeAlias = list[tuple[Tensor, Tensor]]  # of each layer
Attention: TypeAlias = Literal["auto", "segments", "dense"]


@dataclass(slots=True)
class ImageFeatures:
    """Inputs of the language model for one image of N placeholder tokens."""

    merged: Tensor  # [N, D]
    deepstack: list[Tensor] = field(default_factory=list)  # [N, D] per layer

    @property
    def num_bytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in (self.merged, *self.deepstack))


class Backbone:
    """Wraps a model (plain, or with LoRA layers injected).

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
        images: ImageLayout,
        suppressed_ids: np.ndarray,
        cache_bytes: int = CACHE_BYTES,
        head_dtype: HeadDType = "model",
        image_by_image: bool = False,
    ) -> None:
        self.model: Any = model
        self.images, self.image_by_image = images, image_by_image
        self.text = text_model(model)
        self.device = next(model.parameters()).device
        vocab_size = self.lm_head.weight.shape[0]
        bias = torch.zeros(vocab_size, dtype=torch.float32)
        bias[torch.from_numpy(suppressed_ids)] = float("-inf")
        self.token_bias = bias.to(self.device)  # [V]: 0 where allowed, -inf where suppressed
        self.wide_head = head_dtype == "float32" and self.lm_head.weight.dtype != torch.float32
        # Logits are within ± this, by a tanh (Gemma 2, arXiv 2408.00118, section 2.1).
        self._settings: Any = model.config.get_text_config()  # type: ignore[operator,union-attr]
        self.softcap: float | None = getattr(self._settings, "final_logit_softcapping", None)
        self._attention: Attention = "dense"
        # Features of a tower that is trained need a gradient, and are other ones after every step.
        self.trains_tower = any(one.requires_grad for tower in towers(model) for one in tower.parameters())
        self.checkpoints_tower = False  # its layers are computed again in the backward pass
        self._read_ahead = ReadAhead(images)
        self._cache: OrderedDict[str, ImageFeatures] = OrderedDict()
        self._cache_bytes = cache_bytes
        self._cached_bytes = 0
        self.cache_hits = self.cache_misses = 0
        inner: Any = type(self.model.model)
        self._arguments = inspect.signature(inner.forward).parameters
        # Whether a row may hold a prompt and several continuations, which takes layers that attend to all that a mask
        # shows, or whose state can be handed on: sliding windows and convolutions know no such mask, nor do images
        # whose tokens see each other. With axes the types of tokens serve only to compute positions, which are given.
        kinds = set(getattr(self._settings, "layer_types", None) or ())
        windows = not kinds and getattr(self._settings, "sliding_window", None)
        plain = images.axes > 1 or not {"token_type_ids", "mm_token_type_ids"} & set(self._arguments)
        self._recurrent = recurrent_layers(self.text)  # to which a mask cannot say what they see
        packed = {"full_attention", "linear_attention"} if self._recurrent else {"full_attention"}
        self.packs = plain and not windows and kinds <= packed
        self._image_arguments = inspect.signature(inner.get_image_features).parameters

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
        """`image_features` is asked for these next: a thread decodes images that are not cached."""
        self._read_ahead.announce(image for image in images if image.sha256 not in self._cache)

    def forget_images(self) -> None:
        """Drop the cached features, because the vision tower changes."""
        self._cache.clear()
        self._cached_bytes = 0

    def _vision_batches(self, images: Sequence[EncodedImage]) -> Iterable[Sequence[EncodedImage]]:
        """The images in batches of bounded size: the memory of a forward pass grows with what is in it."""
        return ([image] for image in images)

    def _encode(self, images: Sequence[EncodedImage]) -> dict[str, ImageFeatures]:
        """Features by hash of images that go through the tower together."""
        found = {}
        for image, inputs in zip(images, self._read_ahead.read(images), strict=True):
            tensors = {
                name: value.to(self.device, self.model.dtype if value.is_floating_point() else None)
                for name, value in inputs.items()
                if name in self._image_arguments
            }
            rows = self.model.model.get_image_features(**tensors, return_dict=True).pooler_output
            pieces = [rows] if isinstance(rows, Tensor) else list(rows)  # tiles, or images of which this is one
            merged = torch.cat([piece.flatten(0, -2) for piece in pieces])
            found[image.sha256] = self.checked(image, ImageFeatures(merged.clone()))
        return found

    def checked(self, image: EncodedImage, features: ImageFeatures) -> ImageFeatures:
        """The features. Raises RLVLMError where they have not a row for each placeholder in every layer: others would
        be broadcast, and the model would see nothing."""
        wanted = (self.images.num_features(image.width, image.height), self.width)
        shapes = {tuple(tensor.shape) for tensor in (features.merged, *features.deepstack)}
        if shapes != {wanted}:
            raise RLVLMError(
                f"transformers {transformers.__version__} gives an image of {wanted[0]} tokens features of the shapes "
                f"{shapes} in place of {wanted}: install a version that rl-vlm's requirements name."
            )
        return features

    def choose_attention(self, attention: Attention) -> None:
        """How the language model attends in packed rows from now on."""
        self._attention = "segments" if self._recurrent else attention
        if self._attention != "dense" and self.packs:
            AttentionInterface.register(NAME, segment_attention)
            self.text.set_attn_implementation(NAME)
            share_states(self._recurrent)

    def attention(self, segments: np.ndarray) -> Tensor | SegmentLayout:
        """What `hidden_states` takes for segments int [B, L]: 0 prompt, 1.. the continuations, -1 padding."""
        if not self.packs or (self._recurrent and self._attention == "dense"):
            return torch.from_numpy(segments >= 0).to(self.device)
        if self._attention != "dense":
            layout = SegmentLayout.of(segments, self.device)
            known = self._settings
            head_dim = getattr(known, "head_dim", None) or known.hidden_size // known.num_attention_heads
            always = self._attention == "segments" or takes_sequences(self.device, self.model.dtype, head_dim)
            if always or layout.is_faster(segments.shape[1], _CALL_COST[self.device.type]):
                return layout
        return dense_mask(torch.from_numpy(segments).to(self.device))

    def hidden_states(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention: Tensor | SegmentLayout,
        features: Sequence[ImageFeatures] = (),
    ) -> Tensor:
        """Last hidden states [B, L, D] of input_ids int64 [B, L] at position_ids int64 [axes, B, L]. attention: a mask
        bool [B, 1, L, K], or [B, L] of what is no padding, or segments. features: in the row-major order of images."""
        masked = isinstance(attention, Tensor)
        extra: dict[str, Any] = {"attention_mask": attention} if masked else {"segments": attention}
        out = self.run(input_ids, position_ids, features, use_cache=False, **extra)
        return out.last_hidden_state  # type: ignore[no-any-return]

    def run(self, input_ids: Tensor, position_ids: Tensor, features: Sequence[ImageFeatures], **options: Any) -> Any:
        """The model's own forward pass, without its head."""
        is_image = input_ids == self.images.image_token_id
        plain_ids = input_ids.masked_fill(is_image, self._settings.pad_token_id or 0)
        embeds = self.model.get_input_embeddings()(plain_ids)
        if getattr(self._settings, "hidden_size_per_layer_input", None):  # Gemma embeds anew for every layer
            options["per_layer_inputs"] = self.text.get_per_layer_inputs(plain_ids, embeds)
        if features:
            rows = torch.cat([one.merged for one in features]).to(embeds.dtype)
            embeds = embeds.masked_scatter(is_image[..., None], rows)
        types = {name: is_image.long() for name in ("token_type_ids", "mm_token_type_ids") if name in self._arguments}
        positions = position_ids if len(position_ids) > 1 else position_ids[0]
        return self.model.model(inputs_embeds=embeds, position_ids=positions, **types, **options)

    def logits(self, hidden: Tensor, suppress: bool = True) -> Tensor:
        """float32 logits [N, V] of hidden states [N, D], suppressed tokens at -inf."""
        logits = wide_product(hidden, self.lm_head.weight) if self.wide_head else self.lm_head(hidden).float()
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return logits + self.token_bias if suppress else logits
