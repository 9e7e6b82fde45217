"""ModelShape: parameters, LoRA sizes and bytes per token of Qwen2.5-VL and Qwen3-VL models.

Everything is counted from the content of config.json, and equals what transformers' classes allocate.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rl_vlm.types import UserInputError

# What takes memory on a GPU, named and in bytes; and the constants that no configuration says.
#
# It imports no torch, so that a plan needs none; the code that allocates by a constant takes it from here.

GIB = 1 << 30
ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes
# A CUDA context with the kernels of torch and cuBLAS' workspaces, per process. An estimate: 0.4 to 0.6 GiB on cards
# since 2020.
CUDA_CONTEXT = int(0.6 * GIB)
# Patches per pass of the vision tower: 8 million pixels on a GPU; on a CPU what fits into its caches.
PATCHES_AT_ONCE, PATCHES_ON_CPU = 32_768, 2_048
PREFILL_TOKENS = 16_384  # padded prompt tokens per prefill forward pass of the transformers engine
# Keys and values of the transformers engine: lengths are whole blocks, and there are at most so many rows for each that
# is in use when memory is taken.
KV_BLOCK, KV_ROWS_PER_USED = 64, 2
# Logits that exist at once, positions × vocabulary entries. A CPU's tile stays in its caches; a GPU's is large enough
# to fill the card.
HEAD_TILES = {"cpu": (512, 2048), "cuda": (4096, 16_384)}


class Part(NamedTuple):
    """Memory for one purpose; `detail` says where the number comes from."""

    name: str
    bytes: int
    detail: str


def tower_pass_bytes(shape: ModelShape, element: int, patches: int) -> int:
    """The peak of a pass of the vision tower without a gradient.

    Pixels of one frame in float32, the residual stream and its norm, queries, keys and values with float32 copies of
    the first two for the rotation, or the MLP with its activation, whichever is larger.
    """
    tower = shape.tower
    pixels = 4 * tower.patch_inputs // tower.frames
    attention = element * 5 * tower.hidden + 4 * 4 * tower.hidden
    mlp = element * (2 * tower.width + tower.hidden)
    return patches * (pixels + 2 * element * tower.hidden + max(attention, mlp))


def patches_at_once(gpus: float) -> int:
    """Patches of a pass of the vision tower, for an actor with that many GPUs."""
    return PATCHES_AT_ONCE if gpus else PATCHES_ON_CPU


def text(size: int) -> str:
    """Bytes for people."""
    return f"{size / GIB:.2f} GiB" if abs(size) >= GIB / 100 else f"{size / (1 << 20):.2f} MiB"


def amount(parameters: int) -> str:
    """A number of parameters for people."""
    if parameters >= 5e8:
        return f"{parameters / 1e9:.2f} billion"
    return f"{parameters / 1e6:.{1 if parameters >= 1e7 else 2}f} million"


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


class Linear(NamedTuple):
    """A linear layer, `copies` times."""

    name: str
    inputs: int
    outputs: int
    bias: bool = False
    copies: int = 1

    @property
    def parameters(self) -> int:
        """Parameters of all copies."""
        return self.copies * (self.inputs * self.outputs + self.bias * self.outputs)

    def lora(self, rank: int) -> int:
        """LoRA parameters of all copies."""
        return self.copies * rank * (self.inputs + self.outputs)


@dataclass(frozen=True, slots=True)
class TextShape:
    """The language model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int
    vocab: int
    attention_bias: bool
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
        """Parameters of these."""
        return sum(linear.parameters for linear in self.linears())

    @property
    def parameters(self) -> int:
        """Parameters of the layers and the last norm, without embedding and output projection."""
        norms = self.layers * (2 * self.hidden + 2 * self.head_norms * self.head_dim) + self.hidden
        return self.linear_parameters + norms

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of the output projection where it is not tied to it."""
        return self.vocab * self.hidden


@dataclass(frozen=True, slots=True)
class TowerShape:
    """The vision tower; `gated` is Qwen2.5-VL's kind: gated MLPs, norms without bias, no position table, no deep
    stack."""

    hidden: int
    depth: int
    heads: int
    width: int
    patch_inputs: int  # values of a patch over all its frames
    frames: int
    merge: int
    out: int
    positions: int
    deepstack: int  # layers whose features go to the language model, beside the last
    gated: bool

    def linears(self) -> Iterator[Linear]:
        """The linear layers that can be adapted."""
        merged = self.hidden * self.merge**2
        yield Linear("qkv", self.hidden, 3 * self.hidden, True, self.depth)
        yield Linear("proj", self.hidden, self.hidden, True, self.depth)
        if self.gated:
            yield Linear("gate_up", self.hidden, self.width, True, 2 * self.depth)
            yield Linear("down_proj", self.width, self.hidden, True, self.depth)
        else:
            yield Linear("linear_fc1", self.hidden, self.width, True, self.depth)
            yield Linear("linear_fc2", self.width, self.hidden, True, self.depth)
        yield Linear("merger1", merged, merged, True, 1 + self.deepstack)
        yield Linear("merger2", merged, self.out, True, 1 + self.deepstack)

    @property
    def parameters(self) -> int:
        """All of them."""
        norm = 1 if self.gated else 2  # vectors of a norm
        norms = 2 * self.depth * norm * self.hidden + norm * self.hidden
        norms += self.deepstack * norm * self.hidden * self.merge**2
        embed = self.hidden * (self.patch_inputs + (not self.gated)) + self.positions * self.hidden
        return sum(linear.parameters for linear in self.linears()) + norms + embed


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A vision-language model: sizes only."""

    family: str
    text: TextShape
    tower: TowerShape
    tied: bool

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ModelShape:
        """From the content of config.json. Raises UserInputError for families that are not known."""
        family = config.get("model_type")
        if family not in ("qwen3_vl", "qwen2_5_vl"):
            raise UserInputError(f"No memory plan for model type {family!r}: it is known for Qwen2.5-VL and Qwen3-VL.")
        older = family == "qwen2_5_vl"
        text = config.get("text_config", config)  # older folders have the language model's settings at the top
        tower = config["vision_config"]
        heads, hidden = int(text["num_attention_heads"]), int(text["hidden_size"])
        patch, frames = int(tower["patch_size"]), int(tower.get("temporal_patch_size", 2))
        return cls(
            family=family,
            text=TextShape(
                hidden=hidden,
                layers=int(text["num_hidden_layers"]),
                heads=heads,
                kv_heads=int(text.get("num_key_value_heads") or heads),
                head_dim=int(text.get("head_dim") or hidden // heads),
                width=int(text["intermediate_size"]),
                vocab=int(text["vocab_size"]),
                attention_bias=older or bool(text.get("attention_bias", False)),
                head_norms=not older,
            ),
            tower=TowerShape(
                hidden=int(tower["hidden_size"]),
                depth=int(tower["depth"]),
                heads=int(tower["num_heads"]),
                width=int(tower["intermediate_size"]),
                patch_inputs=int(tower.get("in_channels", 3)) * frames * patch**2,
                frames=frames,
                merge=int(tower.get("spatial_merge_size", 2)),
                out=int(tower["out_hidden_size"]),
                positions=0 if older else int(tower["num_position_embeddings"]),
                deepstack=0 if older else len(tower["deepstack_visual_indexes"]),
                gated=older,
            ),
            tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        )

    @classmethod
    def read(cls, folder: Path) -> ModelShape:
        """The shape of the model in a folder. Raises UserInputError."""
        try:
            return cls.from_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserInputError(f"Cannot read the shapes in {folder / 'config.json'} ({error!r}).") from error

    @property
    def parameters(self) -> int:
        """All parameters; tied weights count once."""
        return self.text.parameters + self.tower.parameters + self.text.embedding * (1 if self.tied else 2)

    def adapted(self, target_modules: str) -> list[Linear]:
        """The linear layers that `model.lora.target_modules` changes."""
        language = [linear for linear in self.text.linears() if linear.name in TARGET_MODULES[target_modules]]
        return language + (list(self.tower.linears()) if target_modules == "vision" else [])

    def lora_parameters(self, rank: int, target_modules: str) -> int:
        """Parameters of an adapter."""
        return sum(linear.lora(rank) for linear in self.adapted(target_modules))

    def kv_bytes_per_token(self, element: int) -> int:
        """Keys and values of one token in all layers, with `element` bytes each."""
        return 2 * self.text.layers * self.text.kv_heads * self.text.head_dim * element
