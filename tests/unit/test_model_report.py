"""`rl-vlm doctor MODEL`: the facts of a folder, for people and for programs."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_support import picture
from real_shapes import build
from test_cli import output, run
from transformers import AutoModelForImageTextToText

from rl_vlm.models.families import generic
from rl_vlm.models.loading import load_model, load_text_side
from rl_vlm.models.memory.reading import read_shape
from rl_vlm.runs.model_report import report


@pytest.mark.parametrize(
    ("family", "packs", "end"),
    [("idefics3", True, "<end_of_utterance>"), ("gemma3", False, "<end_of_turn>"), ("qwen3_5", True, "<|im_end|>")],
)
def test_a_family_is_told(family: str, packs: bool, end: str, tmp_path: Path) -> None:
    facts = report(str(build(family, tmp_path / family)))
    assert facts["family"] == family and facts["decoding (transformers engine)"] == "generic"
    assert facts["samples of a prompt share a row"] is packs and facts["end of a turn"] == end
    known = facts["vLLM knows it"] is True or importlib.util.find_spec("vllm") is None
    assert facts["several images"] is True and known
    assert facts["vision tower"] == ("fast" if family == "qwen3_5" else "generic")
    tool = facts["tool messages"]
    assert ("roles must alternate" in tool) if family == "gemma3" else tool is True


def test_a_configuration_that_contradicts_itself_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((build("internvl", tmp_path) / "config.json").read_text())
    config["text_config"]["num_hidden_layers"] += 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    for command in (
        ("doctor", tmp_path),
        ("plan", Path(__file__).parents[2] / "configs/quickstart.yaml", f"model.path={tmp_path}"),
    ):
        assert run(*command) == 2
        assert "num_hidden_layers" in capsys.readouterr().err


def test_the_tiny_model_as_json(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", tiny_folder, "--json") == 0
    facts = json.loads(output(capsys))
    assert (facts["family"], facts["decoding (transformers engine)"]) == ("qwen3_vl", "fast")


def test_sizes_are_those_of_the_model(tmp_path: Path) -> None:
    """Counted without memory; of a tied embedding once."""
    for family in ("smolvlm", "gemma4", "qwen3_5_moe"):
        folder = build(family, tmp_path / family)
        model = AutoModelForImageTextToText.from_pretrained(folder)
        assert read_shape(folder).parameters == sum(parameter.numel() for parameter in model.parameters()), family


def test_the_example_of_a_new_family_on_the_page(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/models.md").read_text()
    names: dict[str, Any] = dict(vars(generic))
    exec(page.split("```python\n")[1].split("```")[0], names)
    folder = build("internvl", tmp_path / "model")
    text, image = load_text_side(folder), picture(np.random.default_rng(0), 40, 40)
    kinds = (generic.Backbone, names["BrightBackbone"])
    (plain,), (bright,) = (
        kind(load_model(folder), text.images, np.empty(0, np.int64)).image_features([image]) for kind in kinds
    )
    assert torch.equal(bright.merged, 2 * plain.merged)
