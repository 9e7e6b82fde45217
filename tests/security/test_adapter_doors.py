"""What may be loaded by HTTP: only adapters below one folder, which fit the model, and not too many of them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import ray
import torch
from core_support import adapted_policy, run_config
from http_support import Server, serving
from registry_support import Direct
from safetensors.torch import load_file, save_file

from rl_vlm.http.backend import ServeBackend
from rl_vlm.serving.adapters import ServedAdapters
from rl_vlm.serving.registry import VersionRegistry

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
LIMITS: dict[str, Any] = {"max_adapters": 2, "max_adapter_mib": 4.0}


class Willing(VersionRegistry):
    async def report(self, *_: Any) -> Any:
        return SimpleNamespace(acked={"r": 0.1})


@pytest.fixture(scope="module")
def good(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapted_policy(tiny_folder).payload(1).write(tmp_path_factory.mktemp("good") / "adapter")


@pytest.fixture
def root(good: Path, tmp_path: Path) -> Path:
    """With an adapter inside, and another one outside, whose configuration is secret."""
    for place in ("root/a", "outside"):
        shutil.copytree(good, tmp_path / place)
    about = json.loads((good / CONFIG).read_text())
    (tmp_path / "outside" / CONFIG).write_text(json.dumps({**about, "secret": "hunter2"}))
    return tmp_path / "root"


@pytest.fixture
def server(root: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(ray, "put", lambda payload: payload)
    config = run_config(tiny_folder, http__adapter_root=str(root), http__model_name="tiny")
    config = config.model_copy(update={"http": config.http.model_copy(update=LIMITS)})
    backend = ServeBackend(
        SimpleNamespace(), ServedAdapters(Direct(Willing()), config, tiny_folder), "tiny", run_id="r", deadline_s=10.0
    )
    with serving(backend, tiny_folder, adapter_root=str(root), **LIMITS) as server:
        yield server


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, timeout=60)


def names(server: Server) -> list[str]:
    return [model["id"] for model in httpx.get(f"{server.url}/v1/models", timeout=60).json()["data"]]


def changed(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    state = load_file(folder / TENSORS)
    change(state)
    save_file(state, folder / TENSORS)


def link(root: Path, name: str, target: str) -> None:
    (root / name).symlink_to(target)


def replaced(root: Path, file: str, by: Callable[[Path], None]) -> None:
    (root / "a" / file).unlink()
    by(root / "a" / file)


def about(root: Path, **changes: Any) -> None:
    path = root / "a" / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def first(state: dict[str, torch.Tensor]) -> str:
    return next(iter(state))


# What is done to the folder, the path that is asked for, and a part of the answer.
ATTACKS: dict[str, tuple[Callable[[Path], Any], str, str]] = {
    "traversal": (lambda root: None, "../outside", "lora_path must be"),
    "traversal from inside": (lambda root: None, "a/../../outside", "lora_path must be"),
    "absolute": (lambda root: None, "{outside}", "lora_path must be"),
    "a sibling that begins the same": (lambda root: shutil.copytree(root / "a", f"{root}2"), "{root}2", "lora_path must be"),
    "nowhere": (lambda root: None, "/nowhere", "lora_path must be"),
    "a NUL": (lambda root: None, "a\0b", "lora_path must be"),
    "a very long name": (lambda root: None, "x" * 4000, "lora_path must be"),
    "a home": (lambda root: None, "~", "lora_path must be"),
    "an address": (lambda root: None, "https://example.com/adapter", "lora_path must be"),
    "a linked folder": (lambda root: link(root, "l", "../outside"), "l", "lora_path must be"),
    "a link to itself": (lambda root: link(root, "l", "l"), "l", "lora_path must be"),
    "linked tensors": (
        lambda root: replaced(root, TENSORS, lambda file: file.symlink_to(root.parent / "outside" / TENSORS)), "a", "lora_path must be",
    ),
    "a linked configuration": (
        lambda root: replaced(root, CONFIG, lambda file: file.symlink_to(root.parent / "outside" / CONFIG)), "a", "lora_path must be",
    ),
    "a pipe": (lambda root: replaced(root, CONFIG, os.mkfifo), "a", "lora_path must be"),
    "a device": (lambda root: replaced(root, TENSORS, lambda file: file.symlink_to("/dev/zero")), "a", "lora_path must be"),
    "pickles": (lambda root: (root / "a" / TENSORS).rename(root / "a" / "adapter_model.bin"), "a", ".bin is not read"),
    "pickles under another name": (lambda root: torch.save({}, root / "a" / TENSORS), "a", "cannot be read"),
    "a huge file": (lambda root: os.truncate(root / "a" / TENSORS, 5 << 20), "a", "at most 4 MiB"),
    "a huge configuration": (lambda root: os.truncate(root / "a" / CONFIG, 2 << 20), "a", "lora_path must be"),
    "a huge header": (lambda root: (root / "a" / TENSORS).write_bytes(b"\xff" * 64), "a", "cannot be read"),
    "NaN": (lambda root: changed(root / "a", lambda s: s[first(s)].fill_(float("nan"))), "a", "not finite"),
    "wrong shapes": (lambda root: changed(root / "a", lambda s: s.update({first(s): torch.ones(3, 5)})), "a", "does not fit"),
    "a layer that there is not": (
        lambda root: changed(root / "a", lambda s: s.update({f"{first(s)[:-14]}x.lora_A.weight": torch.ones(4, 4)})), "a", "does not fit",
    ),
    "half of an adapter": (lambda root: changed(root / "a", lambda s: s.pop(first(s))), "a", "does not fit"),
    "another rank than it says": (lambda root: about(root, r=8), "a", "does not fit"),
    "DoRA": (lambda root: about(root, use_dora=True), "a", "no plain LoRA"),
}  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_only_sound_adapters_below_the_root_are_loaded(server: Server, root: Path, attack: str) -> None:
    do, path, expected = ATTACKS[attack]
    do(root)
    path = path.format(root=root, outside=root.parent / "outside")
    reply = post(server, LOAD, lora_name="x", lora_path=path)
    message = reply.json()["error"]["message"]
    assert (reply.status_code, expected in message) == (400, True), reply.text
    assert "hunter2" not in message and "Traceback" not in message and message.endswith(".")
    assert names(server) == ["tiny"]


def test_a_link_that_stays_below_the_root_is_followed(server: Server, root: Path) -> None:
    link(root, "newest", "a")
    assert post(server, LOAD, lora_name="x", lora_path="newest").status_code == 200
    assert names(server) == ["tiny", "x-v1", "x"]


def test_many_adapters_are_refused_and_a_loaded_one_stays(server: Server, root: Path) -> None:
    replies = [post(server, LOAD, lora_name=f"x{number}", lora_path="a").status_code for number in range(4)]
    assert replies == [200, 200, 400, 400]
    (root / "a" / TENSORS).write_bytes(b"")
    assert post(server, LOAD, lora_name="x0", lora_path="a").status_code == 400
    assert {"x0", "x1"} <= set(names(server))
    assert (
        post(server, UNLOAD, lora_name="x0", lora_int_id=3).text == "Success: LoRA adapter 'x0' removed successfully."
    )
    assert post(server, UNLOAD, lora_name="x0").status_code == 404
    assert "x0" not in names(server)


@pytest.mark.parametrize("name", ["tiny", "policy", "policy-v1"])
def test_the_models_own_names_are_neither_taken_nor_dropped(server: Server, name: str) -> None:
    reply = post(server, LOAD, lora_name=name, lora_path="a")
    assert reply.status_code == 400 and "conflicts" in reply.text
    assert post(server, UNLOAD, lora_name=name).status_code in (400, 404)
    assert names(server) == ["tiny"]


@pytest.mark.parametrize(
    "body",
    [{}, {"lora_name": "x"}, {"lora_name": "", "lora_path": "a"}, {"lora_name": "../x", "lora_path": "a"}, {"lora_name": "x@latest", "lora_path": "a"},
     {"lora_name": "x\n", "lora_path": "a"}, {"lora_name": "x" * 81, "lora_path": "a"}, {"lora_name": 1, "lora_path": "a"},
     {"lora_name": "x", "lora_path": ["a"]}, {"lora_name": "x", "lora_path": "a", "is_3d_lora_weight": True}, {"lora_name": "x", "lora_path": "a", "token": 1}],
)  # fmt: skip
def test_bad_bodies_are_refused(server: Server, body: dict[str, Any]) -> None:
    assert post(server, LOAD, **body).status_code == 400
    assert names(server) == ["tiny"]


def test_without_a_root_there_is_no_such_door(tiny_folder: Path) -> None:
    backend = SimpleNamespace()
    with serving(backend, tiny_folder) as server:
        assert {post(server, path, lora_name="x", lora_path="a").status_code for path in (LOAD, UNLOAD)} == {404}


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
def test_the_token_is_asked_for_and_a_web_page_cannot_send_the_body(root: Path, tiny_folder: Path, path: str) -> None:
    with serving(SimpleNamespace(), tiny_folder, adapter_root=str(root), token="s3cret") as server:
        assert post(server, path, lora_name="x", lora_path="a").status_code == 401
    with serving(SimpleNamespace(), tiny_folder, adapter_root=str(root)) as server:
        assert httpx.post(server.url + path, content=b"{}", headers={"Content-Type": "text/plain"}).status_code == 400
