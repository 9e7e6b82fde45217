"""Counts from config.json equal what transformers' classes and peft allocate, on the meta device."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForImageTextToText,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
)

from rl_vlm.models.lora import TARGET_MODULES, inject_lora, lora_config
from rl_vlm.models.memory.shape import ModelShape

# The configurations of the published Qwen3-VL models, by size.
PUBLISHED = json.loads((Path(__file__).parents[1] / "fixtures/qwen3_vl.json").read_text())

# Billions in the index files of the published weights.
PUBLISHED_PARAMETERS = {
    "2b": 2_127_532_032,
    "4b": 4_437_815_808,
    "8b": 8_767_123_696,
    "32b": 33_357_390_064,
}


def on_meta(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config)


def count(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("size", PUBLISHED)
def test_parameters_equal_those_of_the_real_class(size: str) -> None:
    data = PUBLISHED[size]
    model = on_meta(Qwen3VLConfig(**copy.deepcopy(data)))
    shape = ModelShape.from_config(data)
    assert shape.parameters == count(model) == PUBLISHED_PARAMETERS[size]
    assert shape.tower.parameters == count(model.model.visual)
    assert shape.text.parameters + shape.text.embedding == count(model.model.language_model)


@pytest.mark.parametrize("target", [name for name in TARGET_MODULES if name != "none"])
def test_an_adapter_has_the_size_that_peft_gives_it(target: str) -> None:
    data = copy.deepcopy(PUBLISHED["2b"])
    data["text_config"]["num_hidden_layers"] = data["vision_config"]["depth"] = 2
    data["vision_config"]["deepstack_visual_indexes"] = [0]
    model = inject_lora(on_meta(Qwen3VLConfig(**copy.deepcopy(data))), lora_config(32, 64, target))
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert ModelShape.from_config(data).lora_parameters(32, target) == trained


def test_adapters_have_their_known_sizes() -> None:
    """Of rank 32 in float32, in units of 10^6 bytes."""
    sizes = {size: ModelShape.from_config(PUBLISHED[size]).lora_parameters(32, "all") * 4e-6 for size in PUBLISHED}
    assert [round(sizes[size]) for size in ("2b", "4b", "8b")] == [139, 264, 349]


def test_qwen_2_5_is_counted_too(tmp_path: Path) -> None:
    config = Qwen2_5_VLConfig(
        text_config={"num_hidden_layers": 3, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
                     "intermediate_size": 512, "vocab_size": 1000, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}},
        vision_config={"depth": 2, "hidden_size": 64, "num_heads": 4, "intermediate_size": 96, "out_hidden_size": 256},
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(config)
    (tmp_path / "config.json").write_text(config.to_json_string(use_diff=False))
    assert ModelShape.read(tmp_path).parameters == count(model)
