"""Models of transformers: loaded from a folder, made without memory, and the parts that they consist of."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rl_vlm.types import UserInputError

if TYPE_CHECKING:
    from torch import nn

DType = Literal["float32", "bfloat16", "float16"]
HeadDType = Literal["model", "float32"]  # float32: logits are not rounded to the model's type
Quantization = Literal["none", "nf4"]


def from_folder(auto: Any, folder: Path, **options: Any) -> Any:
    """`auto.from_pretrained(folder)`. Raises UserInputError for a model with code of its own, which never runs, and
    for a config.json that contradicts itself."""
    from huggingface_hub.errors import StrictDataclassError

    try:
        return auto.from_pretrained(folder, trust_remote_code=False, **options)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise UserInputError(
            f"The model {folder} brings code of its own, which rl-vlm does not run: choose a model whose family "
            "transformers knows."
        ) from error
    except StrictDataclassError as error:
        raise UserInputError(f"The config.json of {folder} is wrong: {' '.join(str(error).split())}.") from error


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


def keeps_states(folder: Path) -> bool:
    """Whether some layers of the language model keep a state instead of keys and values (linear attention, ...)."""
    from transformers import AutoConfig

    kinds = getattr(AutoConfig.from_pretrained(folder).get_text_config(), "layer_types", None) or ()
    return any(not kind.endswith("_attention") or kind == "linear_attention" for kind in kinds)


def recurrent_layers(text: Any) -> list[Any]:
    """The layers of linear attention in a language model (see recurrence.py)."""
    found = (getattr(module, "linear_attn", None) for module in text.modules())
    return [layer for layer in found if hasattr(layer, "conv1d")]


def text_model(model: Any) -> Any:
    """The language model's own module, without its head."""
    return model.model.language_model if hasattr(model.model, "language_model") else model.model.text_model


def towers(model: Any) -> list[nn.Module]:
    """The other modules, which make features of images."""
    return [module for module in model.model.children() if module is not text_model(model)]
