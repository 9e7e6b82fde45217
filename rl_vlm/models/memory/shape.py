"""ModelShape: parameters, LoRA sizes and bytes per token of models, which equal what transformers' classes allocate. Of
Qwen2.5-VL and Qwen3-VL they follow from config.json; of other families they are counted."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, Field

from rl_vlm.types import UserInputError

# Constants that no configuration says, for the plan, which imports no torch, and for the code that allocates by them.

GIB = 1 << 30
ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes
# Patches per pass of the vision tower: 8 million pixels on a GPU; on a CPU what fits into its caches.
PATCHES_AT_ONCE, PATCHES_ON_CPU = 32_768, 2_048
PREFILL_TOKENS = 16_384  # padded prompt tokens per prefill forward pass of the transformers engine
# Keys and values of the transformers engine: lengths are whole blocks, with at most so many rows for each in use.
KV_BLOCK, KV_ROWS_PER_USED = 64, 2
# Logits that exist at once, positions × vocabulary entries: a CPU's tile stays in its caches, a GPU's fills the card.
HEAD_TILES = {"cpu": (512, 2048), "cuda": (4096, 16_384)}

_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
# Names of the linear layers in the language model, by the choice that users know. `vision` adds the tower's.
TARGET_MODULES: dict[str, tuple[str, ...]] = {
    "none": (),
    "attn": _ATTENTION,
    "mlp": _MLP,
    "all": _ATTENTION + _MLP,  # before its other name: the first that fits is how an adapter is described
    "mlp_attn": _ATTENTION + _MLP,
    "vision": _ATTENTION + _MLP,
}


def gib(size: float) -> int:
    """GiB as bytes."""
    return int(size * GIB)


def text(size: int) -> str:
    """Bytes for people."""
    return f"{size / GIB:.2f} GiB" if abs(size) >= GIB / 100 else f"{size / (1 << 20):.2f} MiB"


def amount(parameters: int) -> str:
    """A number of parameters for people."""
    if parameters >= 5e8:
        return f"{parameters / 1e9:.2f} billion"
    return f"{parameters / 1e6:.{1 if parameters >= 1e7 else 2}f} million"


class Linear(NamedTuple):
    """Linear layers of one name, in all layers of a model together."""

    name: str
    inputs: int
    outputs: int
    bias: bool
    copies: int

    @property
    def parameters(self) -> int:
        return self.copies * (self.inputs + self.bias) * self.outputs

    def lora(self, rank: int) -> int:
        """LoRA parameters of all copies."""
        return self.copies * rank * (self.inputs + self.outputs)


class TextShape(BaseModel):
    """The language model, read from its settings in config.json."""

    hidden: int = Field(alias="hidden_size")
    layers: int = Field(alias="num_hidden_layers")
    heads: int = Field(alias="num_attention_heads")
    kv_heads: int = Field(alias="num_key_value_heads")
    head_dim: int
    width: int = Field(alias="intermediate_size")
    vocab: int = Field(alias="vocab_size")
    attention_bias: bool = False
    head_norms: bool

    def linears(self) -> Iterator[Linear]:
        """The linear layers that can be adapted."""
        queries, keys, bias = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.attention_bias
        yield Linear("q_proj", self.hidden, queries, bias, self.layers)
        yield Linear("k_proj", self.hidden, keys, bias, self.layers)
        yield Linear("v_proj", self.hidden, keys, bias, self.layers)
        yield Linear("o_proj", queries, self.hidden, bias and self.head_norms, self.layers)
        yield Linear("gate_proj", self.hidden, self.width, False, self.layers)
        yield Linear("up_proj", self.hidden, self.width, False, self.layers)
        yield Linear("down_proj", self.width, self.hidden, False, self.layers)

    @property
    def linear_parameters(self) -> int:
        return sum(linear.parameters for linear in self.linears())

    @property
    def parameters(self) -> int:
        """Parameters of the layers and the last norm, without embedding and output projection."""
        norms = self.layers * (2 * self.hidden + 2 * self.head_norms * self.head_dim) + self.hidden
        return self.linear_parameters + norms

    @property
    def kv_per_token(self) -> int:
        """Numbers in the keys and values of one token, in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of the output projection where it is not tied to it."""
        return self.vocab * self.hidden


class TowerShape(BaseModel):
    """The vision tower, read from its settings in config.json. `gated`, Qwen2.5-VL's kind, has gated MLPs, norms
    without bias, no position table and no deep stack."""

    hidden: int = Field(alias="hidden_size")
    depth: int
    width: int = Field(alias="intermediate_size")
    channels: int = Field(3, alias="in_channels")
    frames: int = Field(2, alias="temporal_patch_size")
    patch: int = Field(alias="patch_size")
    merge: int = Field(2, alias="spatial_merge_size")
    out: int = Field(alias="out_hidden_size")
    positions: int = Field(0, alias="num_position_embeddings")
    deepstack: tuple[int, ...] = Field((), alias="deepstack_visual_indexes")  # their features go on beside the last's
    gated: bool

    def linears(self) -> Iterator[Linear]:
        """The linear layers that can be adapted."""
        merged, mergers = self.hidden * self.merge**2, 1 + len(self.deepstack)
        yield Linear("qkv", self.hidden, 3 * self.hidden, True, self.depth)
        yield Linear("proj", self.hidden, self.hidden, True, self.depth)
        yield Linear("up", self.hidden, self.width, True, (1 + self.gated) * self.depth)
        yield Linear("down", self.width, self.hidden, True, self.depth)
        yield Linear("merger1", merged, merged, True, mergers)
        yield Linear("merger2", merged, self.out, True, mergers)

    @property
    def parameters(self) -> int:
        norm = 1 if self.gated else 2  # vectors of a norm
        norms = norm * self.hidden * (2 * self.depth + 1 + len(self.deepstack) * self.merge**2)
        values = self.channels * self.frames * self.patch**2  # of a patch
        embed = self.hidden * (values + (not self.gated) + self.positions)
        return sum(linear.parameters for linear in self.linears()) + norms + embed

    def pass_bytes(self, element: int, patches: int) -> int:
        """The peak of a pass without a gradient."""
        pixels, stream = 4 * self.channels * self.patch**2, 2 * element * self.hidden  # with its norm
        attention = element * 5 * self.hidden + 4 * 4 * self.hidden  # float32 copies of queries and keys are rotated
        mlp = element * (2 * self.width + self.hidden)
        return patches * (pixels + stream + max(attention, mlp))


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a vision-language model."""

    family: str
    text: TextShape
    tower: TowerShape
    tied: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """From the content of config.json. Raises UserInputError for families that are not known."""
        family = str(config.get("model_type"))
        if family not in ("qwen3_vl", "qwen2_5_vl"):
            return count_shape(config)
        older = family == "qwen2_5_vl"
        text = config.get("text_config", config)  # older folders have the language model's settings at the top
        heads = text["num_attention_heads"]
        known: dict[str, Any] = {"num_key_value_heads": heads, "head_dim": text["hidden_size"] // heads}
        known |= {name: value for name, value in text.items() if value is not None}
        known |= {"head_norms": not older} | ({"attention_bias": True} if older else {})
        return cls(
            family,
            TextShape.model_validate(known),
            TowerShape.model_validate({**config["vision_config"], "gated": older}),
            bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        )

    @classmethod
    def read(cls, folder: Path) -> ModelShape:
        """The shape of the model in a folder. Raises UserInputError."""
        try:
            return cls.from_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = " ".join(str(error).split())
            raise UserInputError(f"Cannot read the shapes in {folder / 'config.json'} ({reason}).") from error

    @property
    def parameters(self) -> int:
        """All parameters; tied weights count once."""
        return self.text.parameters + self.tower.parameters + self.text.embedding * (1 if self.tied else 2)

    def adapted(self, target_modules: str) -> list[Linear]:
        """The linear layers that `model.lora.target_modules` changes."""
        names = TARGET_MODULES[target_modules]
        everything = set(names) == set(TARGET_MODULES["all"])  # some families have layers of other names, too
        language = [linear for linear in self.text.linears() if everything or linear.name in names]
        return language + (list(self.tower.linears()) if target_modules == "vision" else [])

    def lora_parameters(self, rank: int, target_modules: str) -> int:
        return sum(linear.lora(rank) for linear in self.adapted(target_modules))

    def kv_bytes_per_token(self, element: int) -> int:
        """Keys and values of one token in all layers, with `element` bytes each."""
        return self.text.kv_per_token * element


# Other families, whose layers are counted instead of read from settings.


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
    from rl_vlm.models.families import text_model, towers
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


def empty_model(config: Mapping[str, Any]) -> Any:
    """transformers' model of a config.json, without memory. Raises UserInputError for a type that it does not know."""
    import torch
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig, AutoModelForImageTextToText

    try:
        with torch.device("meta"):
            return AutoModelForImageTextToText.from_config(AutoConfig.for_model(**config))
    except (KeyError, TypeError, ValueError, StrictDataclassError) as error:
        raise UserInputError(
            f"transformers makes no vision-language model of this {config.get('model_type')!r} config.json: {error}"
        ) from error


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
