"""Adapters and models that were made to harm are refused when they are read."""

import json

import pytest
from safetensors.torch import save
from torch import zeros
from transformers import AutoConfig, AutoModelForImageTextToText

from rl_vlm.models.loading import from_folder
from rl_vlm.models.weights import AdapterPayload
from rl_vlm.types import UserInputError

GOOD = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


def adapter(folder, tensors=None, text=None, **changes):
    folder.mkdir(exist_ok=True)
    name = "base_model.model.model.language_model.layers.0.self_attn.q_proj.lora_A.weight"
    data = save({name: zeros(4, 8)} if tensors is None else tensors)
    (folder / "adapter_model.safetensors").write_bytes(data)
    (folder / "adapter_config.json").write_text(text if text is not None else json.dumps({**GOOD, **changes}))
    return folder


@pytest.mark.parametrize(
    "changes, what",
    [
        ({"r": 0}, "rank 0"),
        ({"r": -1}, "rank -1"),
        ({"r": 1.5}, "rank 1.5"),
        ({"r": True}, "rank True"),
        ({"r": None}, "rank None"),
        ({"r": 10**40}, "rank 1000"),
        ({"lora_alpha": float("inf")}, "lora_alpha inf"),
        ({"lora_alpha": float("nan")}, "lora_alpha nan"),
        ({"lora_alpha": "8"}, "lora_alpha 8"),
        ({"lora_alpha": 10**400}, "lora_alpha 1000"),
        ({"peft_type": "PROMPT_TUNING"}, "is PROMPT_TUNING, not LORA"),
        ({"peft_type": ["LORA"]}, "not LORA"),
        ({"tensors": {}}, "no LoRA matrices"),
        ({"tensors": {"prompt_embeddings": zeros(2, 8)}}, "no LoRA matrices"),
        ({"text": "[]"}, "cannot be read"),
        ({"text": "[" * 100_000}, "cannot be read"),
        ({"text": "{"}, "cannot be read"),
        ({"text": " " * (5 * 2**20)}, "more than 4194304 characters"),
    ],
)
def test_what_is_no_lora_adapter_is_refused_when_it_is_read(changes, what, tmp_path):
    with pytest.raises(UserInputError, match=what) as caught:
        AdapterPayload.read(adapter(tmp_path / "a", **changes), 1)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "changes", [{}, {"lora_alpha": 8.5}, {"r": 256, "lora_alpha": 0}, {"target_modules": ".*q_proj"}]
)
def test_lora_adapters_are_read_as_before(changes, tmp_path):
    assert AdapterPayload.read(adapter(tmp_path / "a", **changes), 3).version == 3


def test_a_header_beyond_the_file_is_refused(tmp_path):
    folder = adapter(tmp_path / "a")
    for data in (b"", b"\xff" * 8, b"\xff" * 100, (2**40).to_bytes(8, "little") + b"{}"):
        (folder / "adapter_model.safetensors").write_bytes(data)
        with pytest.raises(UserInputError, match="no LoRA matrices|cannot be read"):
            AdapterPayload.read(folder, 1)


def test_a_model_with_code_of_its_own_is_refused_without_a_question(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    config = {
        "model_type": "evil",
        "auto_map": {"AutoTokenizer": ["evil.Tokenizer", None], "AutoConfig": "evil.Config"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    for auto in (AutoConfig, AutoModelForImageTextToText):
        with pytest.raises(UserInputError, match="code of its own"):
            from_folder(auto, tmp_path)
    assert not (tmp_path / "ran").exists()
