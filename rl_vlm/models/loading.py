"""Loading a vision-language model and its processor from a folder, the hub's local cache, or the built-in tiny one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor, PreTrainedModel

from rl_vlm.chat import ChatCodec
from rl_vlm.models.images import ImageProcessorSpec
from rl_vlm.types import UserInputError

DType = Literal["float32", "bfloat16", "float16"]

# Families whose multimodal positions and image placeholders `chat.py` and `backbone.py` know.
SUPPORTED_FAMILIES = ("qwen2_5_vl", "qwen3_vl")
_TINY: dict[str, Literal["small", "wide", "labeller"]] = {
    "tiny": "small",
    "tiny-wide": "wide",
    "tiny-labeller": "labeller",
}


@dataclass(frozen=True, slots=True)
class TextSide:
    """What is needed to turn conversations into ids for one model, without its weights."""

    codec: ChatCodec
    images: ImageProcessorSpec
    vocab_size: int

    def count_image_tokens(self, width: int, height: int) -> int:
        """How many placeholder tokens an image of this size takes: grid / merge²."""
        t, h, w = self.images.grid_thw(width, height)
        return t * h * w // self.images.merge_size**2


def resolve_model(name: str, seed: int = 0) -> Path:
    """The folder of a model: `tiny` (built on first use), a local folder, or a hub name that was fetched before.

    `tiny-wide` has heads of 32 dimensions, the smallest that vLLM's CPU kernels know. `tiny-labeller` has them too, and
    tells which of two drawn poles is nearer to upright.
    """
    if name in _TINY:
        from rl_vlm.models.tiny import tiny_model_path

        return tiny_model_path(seed=seed, variant=_TINY[name])
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise UserInputError(f"The folder {folder} holds no config.json: give a Hugging Face model folder.")
        return folder
    if folder.is_absolute() or name.startswith(".") or name.count("/") != 1:
        raise UserInputError(
            f"Model {name!r} is neither a folder, nor 'tiny', nor a hub name such as Qwen/Qwen3-VL-2B-Instruct."
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError as error:
        raise UserInputError(
            f"Model {name} is not on this machine: run `rl-vlm fetch {name}` once while online."
        ) from error


def load_text_side(folder: Path) -> TextSide:
    """The chat codec and the image geometry of a model folder."""
    config = AutoConfig.from_pretrained(folder)
    if config.model_type not in SUPPORTED_FAMILIES:
        raise UserInputError(
            f"Model type {config.model_type!r} is not supported: choose one of {', '.join(SUPPORTED_FAMILIES)}."
        )
    processor = AutoProcessor.from_pretrained(folder)
    template = processor.chat_template or processor.tokenizer.chat_template
    codec = ChatCodec(processor.tokenizer, template, processor.image_token)
    return TextSide(codec, ImageProcessorSpec.from_processor(processor.image_processor), config.text_config.vocab_size)


def load_model(folder: Path, dtype: DType = "float32", device: str = "cpu") -> PreTrainedModel:
    """The model with its weights, in evaluation mode and frozen."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserInputError(f"Device {device} was asked for and torch sees no GPU here: set the device to cpu.")
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="sdpa")
    model.requires_grad_(False)
    return model.to(device).eval()  # type: ignore[no-any-return]


def quiet_libraries() -> None:
    """Keep transformers' progress bars and tokenizers' fork warnings out of worker logs."""
    from transformers.utils import logging

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    logging.disable_progress_bar()
    logging.set_verbosity_error()
