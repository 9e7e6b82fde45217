"""`model`: the vision-language model, and what of it is trained."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from rl_vlm.config.section import Section
from rl_vlm.files import resolved
from rl_vlm.types import PixelLimits

# A token's share of a loss is 1e-5 and less, and float16 has nothing below 6e-8: products with it vanish without a word.
FLOAT16_UNTRAINABLE = (
    "model.dtype float16 cannot be trained in, because gradients of single tokens underflow to 0: set it to bfloat16 or float32; "
    "`rl-vlm eval` and `rl-vlm serve` take float16"
)
_SOLD_AS = 0.97  # of the GiB that a card is sold with, it reports at least this: 23.6 of 24, 47.4 of 48, 79.15 of 80


class LoraSection(Section):
    """LoRA on linear layers."""

    rank: int = Field(16, ge=1, le=512)
    alpha: int = Field(32, ge=1)
    target_modules: Literal["none", "attn", "mlp", "mlp_attn", "all", "vision"] = Field(
        "all",
        description="Of the language model: attn, mlp, or both (mlp_attn, or all, which means the same). vision: both, and the "
        "vision tower's. none: nothing, for evaluation and serving.",
    )


class PlainModelSection(Section):
    """The vision-language model: where it is, and how it computes."""

    path: str = Field("tiny", description="`tiny`, a Hugging Face folder, or a hub name that was fetched before.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "float32", description="float16 is for evaluation and serving alone: gradients underflow in it."
    )
    head_dtype: Literal["model", "float32"] = Field(
        "model",
        description="Of the products that make logits, in every engine and learner alike. model: rounded to `dtype`, which in bfloat16 is "
        "most of what engine and learner differ by. float32: not rounded.",
    )
    min_pixels: int | None = Field(None, ge=1, description="Smaller images are enlarged; null: the processor's limit.")
    max_pixels: int | None = Field(None, ge=1, description="Larger images are reduced; null: the processor's limit.")
    gpu_memory_gib: float | None = Field(
        None,
        gt=0,
        description="The card that this recipe is made for, as it is sold: 24, 48, 80. `doctor`, `plan` and the start of a run compare "
        "it with the machine; cards report up to 3 % less.",
    )

    @property
    def pixels(self) -> PixelLimits:
        """The limits of an image's size, for everything that counts or shows images."""
        return PixelLimits(self.min_pixels, self.max_pixels)

    @property
    def least_gpu_gib(self) -> float | None:
        """What a card of `gpu_memory_gib` reports at least, in GiB; None where nothing is stated."""
        return None if self.gpu_memory_gib is None else self.gpu_memory_gib * _SOLD_AS


class ServedModelSection(PlainModelSection):
    """A model that replicas serve."""

    image_cache_mib: int = Field(
        256,
        ge=0,
        description="Memory for features of images, in each learner and each replica of the transformers engine; what was used "
        "longest ago is dropped; 0: none are kept. Pays where images come again, as rows of a data set do. Of the images' files, which "
        "are sent to a replica once, it keeps a quarter of that, at least 4 MiB.",
    )

    @property
    def image_cache_bytes(self) -> int:
        """`image_cache_mib` in bytes."""
        return self.image_cache_mib << 20


class TrainedModelSection(PlainModelSection):
    """A model of which something is trained."""

    train: Literal["lora", "full"] = Field(
        "lora",
        description="lora: adapters beside frozen weights, which `lora` describes. full: all weights, the vision tower's too, with "
        "float32 masters; `lora` is then not read.",
    )
    lora: LoraSection = LoraSection()
    adapter: str | None = Field(
        None,
        description="A run folder or peft adapter folder that training starts from, such as one of `rl-vlm sft`; `lora` must "
        "describe it. The reference of the KL penalty stays the model without any adapter.",
    )

    @field_validator("adapter")
    @classmethod
    def _absolute_path(cls, adapter: str | None) -> str | None:
        # Other processes have other working directories.
        return None if adapter is None else str(resolved(adapter))


class ModelSection(ServedModelSection, TrainedModelSection):
    """A model that is served and trained."""
