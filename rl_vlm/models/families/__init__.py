"""What each family of vision-language models needs: any by its own code in transformers, Qwen's by faster code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from rl_vlm.models.families.generic import Backbone

# Model types whose towers and images are Qwen's, and those whose language model the transformers engine writes out.
QWEN_TOWERS = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
WRITTEN_OUT = ("qwen2_5_vl", "qwen3_vl")
# Those whose class in vLLM takes no LoRA: vLLM runs transformers' own code for them.
TRANSFORMERS_IN_VLLM = ("llava_onevision",)


def make_backbone(model: Any, *arguments: Any, **options: Any) -> Backbone:
    """The backbone of a model; arguments as of `Backbone`."""
    from rl_vlm.models.families.generic import Backbone
    from rl_vlm.models.families.qwen_vl import QwenBackbone

    kind = QwenBackbone if model.config.model_type in QWEN_TOWERS else Backbone
    return kind(model, *arguments, **options)


def model_type(folder: Path) -> str:
    """As config.json says."""
    return str(json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"])


def keeps_states(folder: Path) -> bool:
    """Whether some layers of the language model keep a state instead of keys and values (linear attention, ...)."""
    from transformers import AutoConfig

    kinds = getattr(AutoConfig.from_pretrained(folder).get_text_config(), "layer_types", None) or ()
    return any(not kind.endswith("_attention") or kind == "linear_attention" for kind in kinds)


def text_model(model: Any) -> Any:
    """The language model's own module, without its head."""
    return model.model.language_model if hasattr(model.model, "language_model") else model.model.text_model


def towers(model: Any) -> list[nn.Module]:
    """The other modules, which make features of images."""
    return [module for module in model.model.children() if module is not text_model(model)]
