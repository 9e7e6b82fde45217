"""One decode step of Qwen's language model, written out.

A decode step handles one token per row. In transformers' modules its cost is mostly overhead: masks, positions in three
axes, keys and values repeated for every query head, cache objects. The same arithmetic in the same order takes a third
of the time here. Weights are read through the model's own modules, so adapters and quantised layers count.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rl_vlm.engines.kv_cache import RowCache
from rl_vlm.types import UserInputError

_STATIC_ROPE = ("default", "linear", "yarn")  # frequencies that do not depend on the length of the sequence


class TextStep:
    """Decode steps of the language model of a Qwen2.5-VL or Qwen3-VL.

    Args:
        model: the model for conditional generation; a token's rotary position has one value here, because sampled text
            advances all three axes together.
        max_positions: rotary positions are below this.
    """

    def __init__(self, model: Any, max_positions: int) -> None:
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
        # rotate_half (x1, x2) -> (-x2, x1) is a roll by half, the minus sign moved into the table.
        half = sin.shape[-1] // 2
        self._cos, self._sin = cos[0], torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)

    def __call__(self, token_ids: Tensor, positions: Tensor, cache: RowCache) -> Tensor:
        """Last hidden states [R, D] of token_ids int64 [R] at rotary positions int64 [R]; the cache grows by one."""
        text, rows = self._text, len(token_ids)
        hidden = text.embed_tokens(token_ids)
        cos, sin = self._cos[positions][:, None], self._sin[positions][:, None]  # [R, 1, head_dim]
        for number, layer in enumerate(text.layers):
            attention = layer.self_attn
            normed = _rms_norm(layer.input_layernorm, hidden)
            shape = (rows, -1, attention.head_dim)
            queries, keys = attention.q_proj(normed).view(shape), attention.k_proj(normed).view(shape)
            if hasattr(attention, "q_norm"):  # Qwen3
                queries, keys = _rms_norm(attention.q_norm, queries), _rms_norm(attention.k_norm, keys)
            values = attention.v_proj(normed).view(shape)
            mixed = cache.attend(number, _rotate(queries, cos, sin), _rotate(keys, cos, sin), values, attention.scaling)
            hidden = hidden + attention.o_proj(mixed)
            normed = _rms_norm(layer.post_attention_layernorm, hidden)
            mlp = layer.mlp
            hidden = hidden + mlp.down_proj(mlp.act_fn(mlp.gate_proj(normed)) * mlp.up_proj(normed))
        return _rms_norm(text.norm, hidden)


def _rms_norm(module: Any, x: Tensor) -> Tensor:
    return functional.rms_norm(x, (x.shape[-1],), module.weight, module.variance_epsilon)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions (RoFormer, arXiv 2104.09864) of x [R, heads, head_dim]."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
