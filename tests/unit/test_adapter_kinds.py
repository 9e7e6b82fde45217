"""Adapters that are more than W + scale * B·A are refused wherever one is named, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tables import table

from rl_vlm.config import TrainedModelSection
from rl_vlm.models.trained import check_initial_adapter, check_trained, find_trained, read_payload
from rl_vlm.models.weights import PREFIX, AdapterPayload, FullPayload
from rl_vlm.types import UserInputError

TABLES = table("adapters")
LAYER = f"{PREFIX}model.language_model.layers.0.self_attn.q_proj"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An adapter folder of plain LoRA."""
    state = {f"{LAYER}.lora_A.weight": torch.ones(4, 8), f"{LAYER}.lora_B.weight": torch.ones(8, 4)}
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"])
    return AdapterPayload.build(1, state, config).write(tmp_path / "adapter")


def change(folder: Path, **changes: Any) -> None:
    """Change keys of an adapter's configuration."""
    path = folder / AdapterPayload.CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    "changes",
    TABLES["an_adapter_that_is_no_plain_lora_is_refused_by_its_key"],
    ids=lambda changes: "-".join(changes) + str(next(iter(changes.values())))[:12],
)
def test_an_adapter_that_is_no_plain_lora_is_refused_by_its_key(folder: Path, changes: dict[str, Any]) -> None:
    change(folder, **changes)
    model = TrainedModelSection.model_validate({"path": "tiny", "adapter": str(folder)})
    for read in (
        lambda: read_payload(folder, 1),
        lambda: find_trained(folder, None),
        lambda: check_initial_adapter(model),
    ):
        with pytest.raises(UserInputError, match=next(iter(changes))):
            read()


@pytest.mark.parametrize(
    "tensor",
    [("model.embed_tokens.base_layer.weight", (9, 8)), ("model.embed_tokens.lora_A.weight", (4, 3, 2, 16, 16))],
    ids=["not of LoRA", "of a convolution"],
)
def test_tensors_that_are_no_lora_of_linear_layers_are_refused_by_name(
    tensor: tuple[str, tuple[int, ...]], tmp_path: Path
) -> None:
    state = {f"{LAYER}.lora_A.weight": torch.ones(4, 8), f"{PREFIX}{tensor[0]}": torch.ones(tensor[1])}
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "embed_tokens"])
    folder = AdapterPayload.build(1, state, config).write(tmp_path / "adapter")
    for read in (lambda: read_payload(folder, 1), lambda: find_trained(folder, None)):
        with pytest.raises(UserInputError, match="embed_tokens"):
            read()


@pytest.mark.parametrize("changes", TABLES["keys_that_do_not_change_the_arithmetic_are_accepted"])
def test_keys_that_do_not_change_the_arithmetic_are_accepted(folder: Path, changes: dict[str, Any]) -> None:
    change(folder, **changes)
    assert find_trained(folder, None) == folder
    assert read_payload(folder, 1).version == 1


def test_the_weights_of_another_model_are_named_before_anything_starts(folder: Path, tmp_path: Path) -> None:
    """Rank and width, names, and full weights: what a command that serves them would find out in a replica."""
    change(folder, base_model_name_or_path="owner/other")
    full = FullPayload.build(1, {"model.x": torch.ones(2)}, "owner/other").write(tmp_path / "weights")
    names = AdapterPayload.build(
        1, {f"{PREFIX}model.x.lora_A.weight": torch.ones(4, 8)}, LoraConfig(r=4, base_model_name_or_path="owner/other")
    ).write(tmp_path / "names")
    for named in (folder, full, names):
        with pytest.raises(UserInputError, match="was trained from owner/other and not from tiny"):
            check_trained(named, "tiny")
    fitting = {f"{LAYER}.lora_A.weight": torch.ones(4, 64), f"{LAYER}.lora_B.weight": torch.ones(64, 4)}
    check_trained(AdapterPayload.build(1, fitting, LoraConfig(r=4)).write(tmp_path / "fitting"), "tiny")


def test_a_folder_that_is_not_there_is_not_one_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "adapter-1").mkdir()
    with pytest.raises(UserInputError, match=r"no folder .*adapter-2, .* Did you mean .*adapter-1\?"):
        find_trained(tmp_path / "adapter-2")
