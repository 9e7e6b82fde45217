"""A run's model on another node: the same folder or the node's own equal copy, else one clear error."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from rl_vlm.models import reference
from rl_vlm.models.reference import ModelReference, hash_model
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
    ("name", "why"), [("/models/mine", "There is no folder /models/mine"), (HUB_NAME, "HF_HUB_OFFLINE is set")]
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


# --- The digest of a model folder: equal for equal models wherever they lie, different for what computes or reads differently


ENDS = ("model.embed_tokens.weight", "model.visual.merger.weight")  # first and last by name, and far above a MiB
MATRIX = "model.language_model.layers.0.mlp.up_proj.weight"


def write_model(folder: Path, matrix: np.ndarray) -> Path:
    """A model as transformers saves one: what adapters change lies between an embedding and a vision tower."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    large = np.zeros((2000, 1000), dtype=np.float32)
    save_file({ENDS[0]: large, MATRIX: matrix, ENDS[1]: large}, folder / "model.safetensors")
    return folder


def merged(seed: int, share: float = 1.0) -> np.ndarray:
    """A base matrix with an adapter in it, which changes a share of its numbers."""
    rng, adapter = np.random.default_rng(0), np.random.default_rng(seed)
    base = rng.normal(size=(512, 512))
    return (base + adapter.normal(size=base.shape) * (adapter.random(base.shape) < share)).astype(np.float32)


def test_exports_of_one_base_with_different_adapters_differ(tmp_path: Path) -> None:
    folders = [write_model(tmp_path / str(seed), merged(seed)) for seed in (1, 2)]
    assert len({hash_model(folder) for folder in folders}) == 2
    rounded = write_model(tmp_path / "rounded", merged(3, share=0.01))  # most of a small change is lost in 16 bits
    unchanged = write_model(tmp_path / "unchanged", merged(3, share=0.0))
    assert hash_model(rounded) != hash_model(unchanged)
    again = shutil.copytree(folders[0], tmp_path / "again")
    assert hash_model(again) == hash_model(folders[0])


@pytest.mark.parametrize(
    "name", ["chat_template.jinja", "preprocessor_config.json", "tokenizer.json", "merges.txt", "config.json"]
)
def test_the_text_side_counts(name: str, tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", merged(1))
    seen = {hash_model(folder)}
    for content in ("one", "two"):
        (folder / name).write_text(content)
        seen.add(hash_model(folder))
    assert len(seen) == 3
    (folder / f".{name}").write_text("a draft")
    (folder / "README.md").write_text("a card")
    assert hash_model(folder) in seen
