"""`model`: the vision-language model and its LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from rl_vlm.config.section import Section
from rl_vlm.types import PixelLimits


class LoraSection(Section):
    """LoRA on linear layers."""

    rank: int = Field(16, ge=1, le=512)
    alpha: int = Field(32, ge=1)
    target_modules: Literal["none", "attn", "mlp", "mlp_attn", "all", "vision"] = Field(
        "all",
        description="Of the language model: attn, mlp, or both (mlp_attn, or all, which means the same). vision: both, and the "
        "vision tower's. none: nothing, for evaluation and serving.",
    )


class ModelSection(Section):
    """The vision-language model."""

    path: str = Field("tiny", description="`tiny`, a Hugging Face folder, or a hub name that was fetched before.")
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    train: Literal["lora", "full"] = "lora"
    lora: LoraSection = LoraSection()
    adapter: str | None = Field(
        None,
        description="A run folder or peft adapter folder that training starts from, such as one of `rl-vlm sft`; `lora` must "
        "describe it. The reference of the KL penalty stays the model without any adapter.",
    )
    min_pixels: int | None = Field(None, ge=1, description="Smaller images are enlarged; null: the processor's limit.")
    max_pixels: int | None = Field(None, ge=1, description="Larger images are reduced; null: the processor's limit.")
    gpu_memory_gib: float | None = Field(
        None,
        gt=0,
        description="What this recipe needs on one GPU; `doctor` and `--dry-run` compare it with the machine.",
    )

    @field_validator("adapter")
    @classmethod
    def _absolute_path(cls, adapter: str | None) -> str | None:
        # Other processes have other working directories.
        return None if adapter is None else str(Path(adapter).expanduser().resolve())

    @property
    def pixels(self) -> PixelLimits:
        """The limits of an image's size, for everything that counts or shows images."""
        return PixelLimits(self.min_pixels, self.max_pixels)
