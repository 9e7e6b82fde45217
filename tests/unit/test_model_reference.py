"""A run's model on another node: the same folder or the node's own equal copy, else one clear error."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import pytest

from rl_vlm.models import reference
from rl_vlm.models.digest import hash_model
from rl_vlm.models.reference import ModelReference
from rl_vlm.types import UserInputError

HUB_NAME = "Qwen/Qwen3-VL-2B-Instruct"


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def elsewhere(tiny_folder: Path, name: str) -> ModelReference:
    """As another node gets it: the driver's folder is not there."""
    return ModelReference(name, Path("/nowhere/of/the/driver"), hash_model(tiny_folder))


def test_a_relative_path_means_the_drivers_folder(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tiny_folder.parent)
    model = ModelReference.of(tiny_folder.name)
    monkeypatch.chdir("/")
    assert model.on_this_node() == tiny_folder


def test_a_nodes_own_equal_copy_is_used(tiny_folder: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    shutil.copytree(tiny_folder, own)
    assert elsewhere(tiny_folder, str(own)).on_this_node() == own


def test_a_model_of_the_hub_is_downloaded(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "fetch_model", {HUB_NAME: tiny_folder}.__getitem__)
    assert elsewhere(tiny_folder, HUB_NAME).on_this_node() == tiny_folder


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("/models/mine", "is neither a folder"),
        (HUB_NAME, "HF_HUB_OFFLINE is set"),
    ],
)
def test_an_error_names_path_node_and_what_to_do(tiny_folder: Path, name: str, why: str) -> None:
    with pytest.raises(UserInputError) as error:
        elsewhere(tiny_folder, name).on_this_node()
    said = str(error.value)
    assert f"Node {socket.gethostname()} has no copy of the model {name}" in said and why in said
    assert "/nowhere/of/the/driver" in said
    assert "on a file system that all nodes mount, or name a model of the hub" in said


def test_another_model_of_the_same_name_is_rejected(tiny_folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_folder, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "note": "another revision"}))
    with pytest.raises(UserInputError, match="differs"):
        elsewhere(tiny_folder, str(other)).on_this_node()
