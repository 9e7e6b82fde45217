"""Shapes from a model's config.json: read from its settings for families that say how, else counted."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rl_vlm.models.families import family_of
from rl_vlm.models.memory.shape import Linear, ModelShape, TextShape, TowerShape
from rl_vlm.models.modules import empty_model, recurrent_layers, text_model, towers
from rl_vlm.types import UserInputError


def read_shape(folder: Path) -> ModelShape:
    """The shape of the model in a folder. Raises UserInputError."""
    try:
        return shape_of_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise UserInputError(f"Cannot read the shapes in {folder / 'config.json'} ({reason}).") from error


def shape_of_config(config: Mapping[str, Any]) -> ModelShape:
    """The shape of a model with this config.json. Raises UserInputError for a type that transformers does not know."""
    read = family_of(str(config.get("model_type"))).shape
    return count_shape(config) if read is None else read(config)


_CHUNK = 64  # tokens that a kernel for gated delta networks takes at once


class _Counted(BaseModel):
    """What is counted instead of read from settings."""

    counted: list[Linear]
    total: int

    def linears(self) -> Iterator[Linear]:
        yield from self.counted

    @property
    def parameters(self) -> int:
        return self.total


class CountedText(_Counted, TextShape):
    """A language model whose layers are counted."""

    @property
    def kv_per_token(self) -> int:
        return 2 * sum(linear.copies * linear.outputs for linear in self.counted if linear.name == "k_proj")


class CountedTower(_Counted, TowerShape):
    """Towers and projectors whose layers are counted."""


def count_shape(config: Mapping[str, Any]) -> ModelShape:
    """From the content of config.json of any family, by transformers' model of it. Raises as `empty_model`."""
    from rl_vlm.models.lora import adaptable_linears

    model = empty_model(config)
    family, settings = str(config["model_type"]), model.config
    text, vision = settings.get_text_config(), settings.vision_config
    parts: dict[bool, Counter[tuple[str, int, int, bool]]] = {True: Counter(), False: Counter()}
    language = {id(module) for module in text_model(model).modules()}
    for name, module in adaptable_linears(model).items():
        leaf = name.rsplit(".", 1)[-1]
        parts[id(module) in language][leaf, module.in_features, module.out_features, module.bias is not None] += 1
    linears = {side: [Linear(*key, copies) for key, copies in found.items()] for side, found in parts.items()}
    sizes = {side: sum(p.numel() for part in of for p in part.parameters()) for side, of in
             ((True, [text_model(model)]), (False, towers(model)))}  # fmt: skip
    recurrent = recurrent_layers(text_model(model))
    # As a dictionary: of what differs from layer to layer a configuration gives no attribute.
    values = text.to_dict()
    embedding, heads = values["vocab_size"] * values["hidden_size"], values["num_attention_heads"]
    vision_width = int(getattr(vision, "hidden_size", text.hidden_size))
    return ModelShape(
        family,
        CountedText.model_validate({
            "hidden_size": values["hidden_size"], "num_hidden_layers": values["num_hidden_layers"],
            "num_attention_heads": heads, "num_key_value_heads": values.get("num_key_value_heads") or heads,
            "head_dim": values.get("head_dim") or values["hidden_size"] // heads,
            "intermediate_size": values.get("intermediate_size") or values["hidden_size"],
            "vocab_size": values["vocab_size"], "head_norms": True,
            "counted": linears[True], "total": sizes[True] - embedding,
            "state": sum(map(_state_bytes, recurrent)), "state_inputs": sum(map(_state_inputs, recurrent)),
        }),
        CountedTower.model_validate({
            "hidden_size": vision_width,
            "depth": getattr(vision, "depth", None) or vision.num_hidden_layers,
            "intermediate_size": getattr(vision, "intermediate_size", 4 * vision_width), "temporal_patch_size": 1,
            "patch_size": _side(getattr(vision, "patch_size", 16)), "spatial_merge_size": _merge(settings, vision),
            "out_hidden_size": text.hidden_size, "gated": False,
            "counted": linears[False], "total": sizes[False],
        }),
        bool(settings.tie_word_embeddings),
    )  # fmt: skip


def _state_bytes(layer: Any) -> int:
    """In float32: the state, and the inputs that the convolution has behind it."""
    state = layer.num_v_heads * layer.head_k_dim * layer.head_v_dim
    return 4 * int(state + layer.conv1d.in_channels * (layer.conv1d.kernel_size[0] - 1))


def _state_inputs(layer: Any) -> int:
    """Of a token: the convolution's inputs and outputs, keys, queries and values of all heads with the chunk's row of
    their products, and the norm's inputs, which are float32, with its gate and what it hands on."""
    keys, values = layer.num_v_heads * layer.head_k_dim, layer.num_v_heads * layer.head_v_dim
    return int(2 * layer.conv1d.in_channels + 2 * keys + values + layer.num_v_heads * _CHUNK + 6 * values)


def _side(size: Any) -> int:
    return int(size if isinstance(size, int) else size[0])


def _merge(settings: Any, vision: Any) -> int:
    """How many patches, along a side, one token stands for."""
    for holder in (settings, vision):
        for name in ("scale_factor", "spatial_merge_size", "downsample_factor"):
            if value := getattr(holder, name, None):
                return int(value)
    if ratio := getattr(settings, "downsample_ratio", None):
        return round(1 / ratio)
    if tokens := getattr(settings, "mm_tokens_per_image", None):
        return round(_side(vision.image_size) / _side(vision.patch_size) / math.sqrt(tokens))
    return 1
