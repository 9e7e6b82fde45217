"""Qwen3-VL models of any shape with random weights, for measurements that need no hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_vlm.models import tiny


def random_model(folder: Path, **text: Any) -> Path:
    """Write a Qwen3-VL with the tiny model's tokenizer and vision tower, its language model changed by `text`."""
    import torch
    from transformers import Qwen3VLForConditionalGeneration

    if folder.exists():
        return folder
    processor = tiny.build_processor()
    config = tiny.build_model(0, processor.tokenizer, "wide").config
    for name, value in text.items():
        setattr(config.text_config, name, value)
    # The vision tower writes into the language model's width.
    config.vision_config.out_hidden_size = config.text_config.hidden_size
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(config)
    model.generation_config = tiny.build_model(0, processor.tokenizer, "wide").generation_config
    draft = folder.with_name(f".{folder.name}")
    model.save_pretrained(draft)
    processor.save_pretrained(draft)
    draft.rename(folder)
    return folder
