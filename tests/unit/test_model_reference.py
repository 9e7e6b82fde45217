"""A run's model on another node: its own copy if that is equal, else the driver's files, else one clear error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from rl_vlm.models import reference
from rl_vlm.models.digest import hash_model
from rl_vlm.models.loading import load_model, load_text_side
from rl_vlm.models.reference import ModelReference, travelling_files
from rl_vlm.types import UserInputError


class Driver:
    """Gives its files, and counts how often."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, 0

    def __call__(self) -> Mapping[str, bytes]:
        self.calls += 1
        return travelling_files(self.folder)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RL_VLM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "cache"


def elsewhere(tiny_folder: Path, name: str = "tiny") -> ModelReference:
    """As another node gets it: the driver's folder is not there."""
    return ModelReference(name, Path("/nowhere/of/the/driver"), hash_model(tiny_folder))


def test_the_same_folder_is_used_as_it_is(tiny_folder: Path) -> None:
    driver = Driver(tiny_folder)
    assert ModelReference.of(str(tiny_folder)).on_this_node(driver) == tiny_folder and driver.calls == 0


def test_a_small_model_travels_whole_and_once(tiny_folder: Path, cache: Path) -> None:
    driver = Driver(tiny_folder)
    found = elsewhere(tiny_folder).on_this_node(driver)
    assert found.parent == cache and hash_model(found) == hash_model(tiny_folder)
    assert load_text_side(found).vocab_size == load_text_side(tiny_folder).vocab_size
    load_model(found)
    assert elsewhere(tiny_folder).on_this_node(driver, weights=False) == found and driver.calls == 1


def test_processes_of_one_node_write_it_once(tiny_folder: Path, cache: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = {task.result() for task in [pool.submit(elsewhere(tiny_folder).on_this_node, Driver(tiny_folder))] * 8}
    assert len(found) == 1 and [path.name for path in cache.iterdir() if path.is_dir()] == [found.pop().name]


def test_of_a_large_model_only_the_text_side_travels(
    tiny_folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_SMALL_FILE", 1 << 20)
    driver = Driver(tiny_folder)
    found = elsewhere(tiny_folder, "Qwen/Qwen3-VL-2B-Instruct").on_this_node(driver, weights=False)
    assert load_text_side(found).vocab_size and not list(found.glob("*.safetensors"))
    with pytest.raises(UserInputError, match="Node .* cannot load the model Qwen/.*: .*rl-vlm fetch"):
        elsewhere(tiny_folder, "Qwen/Qwen3-VL-2B-Instruct").on_this_node(driver)


def test_another_model_of_the_same_name_is_refused(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "_SMALL_FILE", 1 << 20)
    other = tmp_path / "other"
    shutil.copytree(tiny_folder, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "note": "another revision"}))
    with pytest.raises(UserInputError, match="differs from the driver's folder: fetch the same revision"):
        elsewhere(tiny_folder, str(other)).on_this_node(Driver(tiny_folder))


def test_an_equal_copy_of_the_node_needs_nothing_of_the_driver(tiny_folder: Path, tmp_path: Path) -> None:
    own, driver = tmp_path / "own", Driver(tiny_folder)
    shutil.copytree(tiny_folder, own)
    assert elsewhere(tiny_folder, str(own)).on_this_node(driver) == own and driver.calls == 0


def test_names_with_folders_are_refused_and_leave_nothing(tiny_folder: Path, cache: Path) -> None:
    with pytest.raises(ValueError, match="no file name"):
        elsewhere(tiny_folder).on_this_node(lambda: {"../config.json": b"{}", "model.safetensors": b""})
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_code_and_pickles_do_not_travel(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    for name in ("modeling.py", "pytorch_model.bin", "state.pkl"):
        (folder / name).write_bytes(b"x")
    assert travelling_files(folder) == travelling_files(tiny_folder)


def test_an_edited_template_is_not_taken_from_the_copy_before(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    before = elsewhere(folder).on_this_node(Driver(folder))
    (folder / "chat_template.jinja").write_text((folder / "chat_template.jinja").read_text() + "{# edited #}")
    after = elsewhere(folder).on_this_node(Driver(folder), weights=False)
    assert after != before and (after / "chat_template.jinja").read_text().endswith("{# edited #}")
