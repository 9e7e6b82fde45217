"""`rl-vlm doctor MODEL`: the facts of a folder, for people and for programs."""

import json
from pathlib import Path

import pytest
from real_shapes import build
from test_cli import output, run

from rl_vlm.models.memory.shape import ModelShape
from rl_vlm.runs.model_report import report


@pytest.mark.parametrize(
    ("family", "packs", "end"),
    [("idefics3", True, "<end_of_utterance>"), ("gemma3", False, "<end_of_turn>"), ("qwen3_5", False, "<|im_end|>")],
)
def test_a_family_is_told(family: str, packs: bool, end: str, tmp_path: Path) -> None:
    facts = report(str(build(family, tmp_path / family)))
    assert facts["family"] == family and facts["decoding (transformers engine)"] == "generic"
    assert facts["samples of a prompt share a row"] is packs and facts["end of a turn"] == end
    assert facts["several images"] is True and facts["vLLM knows it"] is True
    assert facts["vision tower"] == ("fast" if family == "qwen3_5" else "generic")
    tool = facts["tool messages"]
    assert ("roles must alternate" in tool) if family == "gemma3" else tool is True


def test_the_tiny_model_as_json(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", tiny_folder, "--json") == 0
    facts = json.loads(output(capsys))
    assert (facts["family"], facts["decoding (transformers engine)"]) == ("qwen3_vl", "fast")


def test_sizes_are_those_of_the_model(tmp_path: Path) -> None:
    """Counted without memory; of a tied embedding once."""
    from transformers import AutoModelForImageTextToText

    for family in ("smolvlm", "gemma4", "qwen3_5_moe"):
        folder = build(family, tmp_path / family)
        model = AutoModelForImageTextToText.from_pretrained(folder)
        assert ModelShape.read(folder).parameters == sum(parameter.numel() for parameter in model.parameters()), family
