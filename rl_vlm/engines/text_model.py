"""Qwen's language model written out for generation: prefill of prompts, and one decode step for all rows.

transformers' modules spend much time outside arithmetic: masks, positions in three axes, keys and values repeated for every
query head, cache objects, and a last layer computed for prompt tokens whose output is not used. Weights are read through the
model's own modules, so adapters and quantised layers are included.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rl_vlm.engines.kv_cache import RowCache
from rl_vlm.models.backbone import ImageFeatures
from rl_vlm.models.grouped_heads import causal_attention, last_token_attention
from rl_vlm.models.rotary import rolled_sin, rotate
from rl_vlm.types import UserInputError

_STATIC_ROPE = ("default", "linear", "yarn")  # frequencies that do not depend on the length of the sequence
KeysValues = list[tuple[Tensor, Tensor]]


class TextModel:
    """The language model of a Qwen2.5-VL or Qwen3-VL. Its results carry no gradients.

    Args:
        model: the model for conditional generation; a sampled token's rotary position has one value here, because sampled
            text advances all three axes together.
        max_positions: rotary positions of sampled tokens are below this.
    """

    def __init__(self, model: Any, max_positions: int) -> None:
        self.parts_done = 0  # halves of layers, so that a long forward pass can be told from one that hangs
        self._text = model.model.language_model
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

    def step(self, token_ids: Tensor, positions: Tensor, cache: RowCache) -> Tensor:
        """Last hidden states [R, D] of token_ids int64 [R] at rotary positions int64 [R]; the cache grows by one."""
        cos, sin = self._cos[positions], self._sin[positions]
        hidden = self._text.embed_tokens(token_ids)
        for number, layer in enumerate(self._text.layers):
            attention = layer.self_attn
            normed = _rms_norm(layer.input_layernorm, hidden)
            keys, values = _keys(attention, normed, cos, sin), _split(attention, attention.v_proj(normed))
            mixed = cache.attend(number, _queries(attention, normed, cos, sin), keys, values, attention.scaling)
            self.parts_done += 1
            hidden = _feed_forward(layer, hidden + attention.o_proj(mixed))
            self.parts_done += 1
        return _rms_norm(self._text.norm, hidden)

    def prefill(
        self,
        input_ids: Tensor,
        positions: Tensor,
        lengths: Tensor,
        image_token_id: int,
        features: Sequence[ImageFeatures] = (),
    ) -> tuple[Tensor, KeysValues]:
        """Last hidden states [B, D] of each prompt's last token, and per layer keys and values [B, heads, L, head_dim].

        input_ids int64 [B, L], padded on the right; positions int64 [3, B, L]; lengths int64 [B] without padding; features
        of the images in the row-major order of their placeholders.
        """
        text, (rows, longest) = self._text, input_ids.shape
        cos, sin = text.rotary_emb(text.norm.weight.new_zeros(1), positions)
        cos, sin = cos.flatten(0, 1)[:, None], rolled_sin(sin.flatten(0, 1))[:, None]  # [B * L, 1, head_dim]
        hidden = text.embed_tokens(input_ids.flatten())  # [B * L, D]
        places = (input_ids.flatten() == image_token_id).nonzero().squeeze(1)
        if features:
            hidden.index_copy_(0, places, torch.cat([f.merged for f in features]).to(hidden.dtype))
        stored: KeysValues = []
        num_layers, num_deepstack = len(text.layers), len(features[0].deepstack) if features else 0
        last = torch.arange(rows, device=lengths.device) * longest + lengths - 1
        for number, layer in enumerate(text.layers):
            attention, mask = layer.self_attn, None
            normed = _rms_norm(layer.input_layernorm, hidden)
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
        return _rms_norm(text.norm, hidden if len(hidden) == rows else hidden[last]), stored


def _split(attention: Any, projected: Tensor) -> Tensor:
    """[N, heads, head_dim] of [N, heads * head_dim]."""
    return projected.view(len(projected), -1, attention.head_dim)


def _queries(attention: Any, normed: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _rotated(_split(attention, attention.q_proj(normed)), getattr(attention, "q_norm", None), cos, sin)


def _keys(attention: Any, normed: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _rotated(_split(attention, attention.k_proj(normed)), getattr(attention, "k_norm", None), cos, sin)


def _rotated(heads: Tensor, norm: Any, cos: Tensor, sin: Tensor) -> Tensor:
    # Qwen3 normalises queries and keys, Qwen2.5 does not.
    return rotate(heads if norm is None else _rms_norm(norm, heads), cos, sin)


def _feed_forward(layer: Any, hidden: Tensor) -> Tensor:
    mlp, normed = layer.mlp, _rms_norm(layer.post_attention_layernorm, hidden)
    return hidden + mlp.down_proj(mlp.act_fn(mlp.gate_proj(normed)) * mlp.up_proj(normed))


def _rms_norm(module: Any, x: Tensor) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), module.weight, module.variance_epsilon)
