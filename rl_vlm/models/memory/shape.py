"""ModelShape: parameters, LoRA sizes and bytes per token of a model, as transformers' classes allocate them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import BaseModel, Field

GIB = 1 << 30
ELEMENT = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes
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
    state: int = 0  # bytes that layers of linear attention keep of a sample, however long it is
    state_inputs: int = 0  # numbers of a token that they keep for their backward pass, all together; an estimate

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
    """The vision tower, read from its settings in config.json. `gated`: with gated MLPs, norms
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
