"""Qwen3-VL models of any shape with random weights, for measurements that need no hub."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

from rl_vlm.zoo.tiny import model as tiny

# 6 M parameters; a picture of 224² pixels is 49 tokens.
SIX_MILLION: dict[str, Any] = {
    "vision": {
        "depth": 3, "hidden_size": 192, "num_heads": 6, "intermediate_size": 384, "num_position_embeddings": 196
    },
    "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 704, "head_dim": 32,
}  # fmt: skip
_PUBLISHED = Path(__file__).parents[1] / "tests/fixtures/qwen3_vl.json"  # the configurations of the published models


def shape(size: str) -> dict[str, Any]:
    """Arguments of `random_model` for "6m", "2b" or "4b"."""
    if size == "6m":
        return SIX_MILLION
    published = json.loads(_PUBLISHED.read_text())[size]
    text = {name: value for name, value in published["text_config"].items() if not name.endswith("_token_id")}
    return {"vision": published["vision_config"], **text}


def random_model(
    folder: Path,
    vision: dict[str, Any] | None = None,
    max_pixels: int | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    **text: Any,
) -> Path:
    """Write a Qwen3-VL with the tiny model's tokenizer, its configuration changed by `text` and `vision`.

    End-of-turn is made unlikely, so that greedy samples run to their limit. Large models are made faster on a GPU.
    """
    import torch
    from transformers import AutoModelForImageTextToText

    if folder.exists():
        return folder
    processor = tiny.build_processor()
    if max_pixels is not None:
        size = {"shortest_edge": tiny.MIN_PIXELS, "longest_edge": max_pixels}
        processor.image_processor.size = processor.video_processor.size = size
    like = tiny.build_model(0, processor.tokenizer, "wide")
    config = like.config
    for section, changes in ((config.text_config, text), (config.vision_config, vision or {})):
        for name, value in changes.items():
            setattr(section, name, value)
    # The vision tower writes into the language model's width.
    config.vision_config.out_hidden_size = config.text_config.hidden_size
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(config, dtype=getattr(torch, dtype))
    with torch.no_grad():
        model.get_input_embeddings().weight[config.text_config.eos_token_id] = 0
    model.generation_config = like.generation_config
    draft = folder.with_name(f".{folder.name}")
    model.save_pretrained(draft)
    processor.save_pretrained(draft)
    draft.rename(folder)
    if device != "cpu":  # an engine that starts now measures what is free
        del model
        gc.collect()
        torch.cuda.empty_cache()
    return folder
