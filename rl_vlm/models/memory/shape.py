"""ModelShape: parameters, LoRA sizes and bytes per token of a model, counted in what transformers makes of it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rl_vlm.types import UserInputError

# Constants that no configuration says, for the plan and for the code that allocates by them.

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


@dataclass(frozen=True, slots=True)
class TextShape:
    """The language model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    width: int  # of the MLP
    vocab: int
    head_norms: bool  # whether queries and keys are normalised
    linears: tuple[Linear, ...]  # that can be adapted
    parameters: int  # of the layers and the last norm, without embedding and output projection

    @property
    def linear_parameters(self) -> int:
        return sum(linear.parameters for linear in self.linears)

    @property
    def kv_per_token(self) -> int:
        """Numbers in the keys and values of one token, in all layers."""
        return 2 * sum(linear.copies * linear.outputs for linear in self.linears if linear.name == "k_proj")

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of the output projection where it is not tied to it."""
        return self.vocab * self.hidden


@dataclass(frozen=True, slots=True)
class TowerShape:
    """The vision tower with its projectors."""

    hidden: int
    depth: int
    width: int  # of the MLP
    patch: int  # pixels of a side
    merge: int  # patches along a side that one token stands for
    deepstack: int  # layers whose features go on beside the last's
    linears: tuple[Linear, ...]
    parameters: int

    def pass_bytes(self, element: int, patches: int) -> int:
        """The peak of a pass without a gradient."""
        pixels, stream = 4 * 3 * self.patch**2, 2 * element * self.hidden  # with its norm
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
        """From the content of config.json of any family, counted in the model that transformers makes of it without
        memory. Raises UserInputError for a model type that it does not know."""
        import torch
        from transformers import AutoConfig, AutoModelForImageTextToText

        from rl_vlm.models.families import text_model, towers
        from rl_vlm.models.lora import adaptable_linears

        try:
            family = str(config["model_type"])
            settings = AutoConfig.for_model(**config)
            with torch.device("meta"):
                model: Any = AutoModelForImageTextToText.from_config(settings)
        except (KeyError, ValueError) as error:
            raise UserInputError(
                f"transformers knows no vision-language model of type {config.get('model_type')!r}: {error}"
            ) from error
        language = text_model(model)
        inside = {id(module) for module in language.modules()}
        counted: dict[bool, Counter[tuple[str, int, int, bool]]] = {True: Counter(), False: Counter()}
        for name, module in adaptable_linears(model).items():
            leaf = name.rsplit(".", 1)[-1]
            counted[id(module) in inside][leaf, module.in_features, module.out_features, module.bias is not None] += 1
        linears = {
            side: tuple(Linear(*key, copies) for key, copies in found.items()) for side, found in counted.items()
        }
        # As a dictionary: of what differs from layer to layer a configuration gives no attribute.
        values, vision = settings.get_text_config().to_dict(), settings.vision_config
        hidden, heads = values["hidden_size"], values["num_attention_heads"]
        text = TextShape(
            hidden=hidden,
            layers=values["num_hidden_layers"],
            heads=heads,
            kv_heads=values.get("num_key_value_heads") or heads,
            head_dim=values.get("head_dim") or hidden // heads,
            width=values.get("intermediate_size") or hidden,
            vocab=values["vocab_size"],
            head_norms=any(name.endswith("q_norm") for name, _ in language.named_modules()),
            linears=linears[True],
            parameters=sum(p.numel() for p in language.parameters()) - values["vocab_size"] * hidden,
        )
        width = int(getattr(vision, "hidden_size", hidden))
        tower = TowerShape(
            hidden=width,
            depth=getattr(vision, "depth", None) or vision.num_hidden_layers,
            width=getattr(vision, "intermediate_size", 4 * width),
            patch=_side(getattr(vision, "patch_size", 16)),
            merge=_merge(settings, vision),
            deepstack=len(getattr(vision, "deepstack_visual_indexes", ())),
            linears=linears[False],
            parameters=sum(p.numel() for part in towers(model) for p in part.parameters()),
        )
        return cls(family, text, tower, bool(settings.tie_word_embeddings))

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
        language = [linear for linear in self.text.linears if everything or linear.name in names]
        return language + (list(self.tower.linears) if target_modules == "vision" else [])

    def lora_parameters(self, rank: int, target_modules: str) -> int:
        return sum(linear.lora(rank) for linear in self.adapted(target_modules))

    def kv_bytes_per_token(self, element: int) -> int:
        """Keys and values of one token in all layers, with `element` bytes each."""
        return self.text.kv_per_token * element


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
