"""Family: how a kind of vision-language model differs from what transformers' own code does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rl_vlm.models.families.processor import ProcessorImages
from rl_vlm.models.images import ImageLayout
from rl_vlm.models.memory.shape import ModelShape
from rl_vlm.types import PixelLimits


@dataclass(frozen=True, slots=True)
class Family:
    """The facts of a family. Classes that need torch are named as `module:class`, so that facts are read without it."""

    types: tuple[str, ...] = ()  # `model_type` of config.json
    tokenizer: str = ""  # its class in transformers, where that loads without importing the model
    # From a folder, the content of its config.json and `model.min_pixels` and `model.max_pixels`: how images are shown.
    layout: Callable[[Path, Mapping[str, Any], PixelLimits], ImageLayout] = ProcessorImages.from_folder
    shape: Callable[[Mapping[str, Any]], ModelShape] | None = None  # from config.json; None: layers are counted
    backbone: str = "rl_vlm.models.families.generic:Backbone"  # features and forward pass
    text_model: str = ""  # the language model, written out for the transformers engine
    lora_tower: str = ""  # pattern of the tower's linear layers; empty: they are found by their places
    vllm: Literal["auto", "transformers"] = "auto"  # whose code vLLM runs
    image_tokens: int = 0  # of the largest image that the published processors allow; 0: fewer than a step of vLLM's
