"""Tensors as bytes, against safetensors itself."""

from __future__ import annotations

import errno
import hashlib
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save
from task_support import trajectory
from torch import Tensor

from rl_vlm.engines.base import EngineError
from rl_vlm.engines.vllm_weights import FullVersions
from rl_vlm.models import tensor_bytes
from rl_vlm.models.shared_memory import OwnFolder, VersionRoom
from rl_vlm.models.tensor_bytes import file_digest, pack, packed_size, tree_digest
from rl_vlm.models.weights import FullPayload
from rl_vlm.types import (
    Completion,
    EncodedImage,
    Message,
    Sample,
    StopReason,
    Trajectory,
    TrajectoryGroup,
)

KINDS = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool]
SHAPES = st.lists(st.integers(0, 4), max_size=3)
STATES = st.dictionaries(st.text(min_size=1, max_size=8), st.tuples(SHAPES, st.sampled_from(KINDS)), max_size=6)


def tensors(described: dict[str, tuple[list[int], torch.dtype]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: (9 * torch.randn(shape, generator=generator)).to(kind) for name, (shape, kind) in described.items()}


@given(STATES)
def test_packed_bytes_are_those_of_safetensors(described: dict[str, tuple[list[int], torch.dtype]]) -> None:
    described.pop("__metadata__", None)
    state = tensors(described)
    assert (packed := pack(state))[0] == save(state) and packed[1] == tree_digest(packed[0])


def test_a_tensor_in_another_layout_is_packed_in_its_order() -> None:
    plain = torch.arange(12.0).view(3, 4)
    packed = load(bytes(pack({"a": plain.t(), "b": plain[:, 1], "c": plain[:1].expand(2, 4)})[0]))
    assert packed["a"].equal(plain.t()) and packed["b"].equal(plain[:, 1]) and packed["c"].equal(plain[:1].expand(2, 4))


def test_packed_tensors_are_rounded_to_the_nearest() -> None:
    state = tensors({"a": ([64, 3], torch.float32), "b": ([5], torch.bfloat16)})
    assert pack(state, "bfloat16")[0] == save({name: tensor.bfloat16() for name, tensor in state.items()})


def test_parameters_are_packed_without_a_gradient_and_cannot_be_changed_there() -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    packed, _ = pack({"a": parameter * 2})
    with pytest.raises(TypeError, match="read-only"):
        packed[0] = 1


@pytest.mark.parametrize("size", [1, 999, 1000, 1001, 3000, 3500])
def test_the_digest_is_that_of_the_pieces(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_bytes, "PIECE", 1000)
    content = bytes(range(256)) * 14
    content = content[:size]
    wanted = hashlib.sha256(content)
    if size > 1000:
        pieces = [content[start : start + 1000] for start in range(0, size, 1000)]
        wanted = hashlib.sha256(b"".join(hashlib.sha256(piece).digest() for piece in pieces))
    (tmp_path / "file").write_bytes(content)
    assert tree_digest(content) == file_digest(tmp_path / "file") == wanted.hexdigest()


@given(st.lists(st.integers(0, 2500), max_size=6))
def test_the_digest_that_follows_the_packing_is_that_of_the_bytes(sizes: list[int]) -> None:
    state = {f"t{k}": torch.arange(size, dtype=torch.uint8 if k % 2 else torch.int32) for k, size in enumerate(sizes)}
    with mock.patch.object(tensor_bytes, "PIECE", 1000):
        packed, digest = pack(state)
        assert digest == tree_digest(packed) and len(packed) == packed_size(state)


# --- A version in the shared memory of a node


@pytest.fixture
def memory() -> Iterator[OwnFolder]:
    folder = OwnFolder()
    yield folder
    folder.close()
    assert not folder.path.exists()


def version(folder: OwnFolder) -> FullPayload:
    state = {"a": torch.randn(300, 7), "b": torch.ones(5)}
    room = VersionRoom(folder.path, packed_size(state, "bfloat16"))
    payload = FullPayload.build(3, state, "base", "bfloat16", room)
    assert payload.tensors == FullPayload.build(3, state, "base", "bfloat16").tensors
    return payload


def test_a_version_in_shared_memory_travels_by_name(memory: OwnFolder) -> None:
    payload = version(memory)
    sent = pickle.dumps(payload)
    assert len(sent) < 1000 < len(payload.tensors)
    came = pickle.loads(sent)
    assert came == payload and came.verify().state()["b"].tolist() == [1.0] * 5
    Path(payload.file).unlink()
    with pytest.raises(FileNotFoundError):  # a replica that comes too late asks for the newest version
        pickle.loads(sent)
    assert came.verify() and pickle.loads(pickle.dumps(replace(payload, file=""))) == replace(payload, file="")
    assert came.rounded("float32").file == ""


def test_a_version_without_room_in_shared_memory_lies_elsewhere(
    memory: OwnFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, start: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert version(memory).file == "" and not list(memory.path.iterdir())


def test_vllm_maps_a_version_where_it_lies(memory: OwnFolder) -> None:
    payload, versions = version(memory), FullVersions(None, None)
    try:
        file = versions._put(payload)
        assert file.samefile(payload.file)
        file.unlink()
        Path(payload.file).unlink()
        assert versions._put(payload).read_bytes() == payload.tensors
    finally:
        versions.close()


def test_shared_memory_is_freed_when_its_owner_is_killed() -> None:
    code = (
        "from rl_vlm.models.shared_memory import OwnFolder; import time; folder = OwnFolder()\n"
        "(folder.path / 'file').touch(); print(folder.path, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        path = Path(owner.stdout.readline().strip())
        assert (path / "file").exists()
        owner.kill()
    deadline = time.monotonic() + 30
    while path.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not path.exists()


# --- Pickling packs arrays; what comes back equals what went in


def same(one: Any, two: Any) -> bool:
    """Equal in every field, arrays by value and dtype."""
    if isinstance(one, np.ndarray):
        return isinstance(two, np.ndarray) and one.dtype == two.dtype and np.array_equal(one, two)
    if isinstance(one, (Trajectory, TrajectoryGroup, Completion, Sample)):
        return type(one) is type(two) and all(same(getattr(one, f), getattr(two, f)) for f in one.__slots__)
    if isinstance(one, (list, tuple)):
        return type(one) is type(two) and len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


def test_a_group_comes_back_as_it_was() -> None:
    more = {
        "images": (EncodedImage("hash", b"png", 3, 4),), "info": {"correct": True, "score": 0.5},
        "messages": (Message.of("user", "hello"),), "error": "why", "replica_ids": ("replica-1",),
    }  # fmt: skip
    members = [trajectory(f"g:{k}", [(length, 0.25), (2, 1.0)], **more) for k, length in enumerate((5, 3, 9))]
    group = TrajectoryGroup("g", 3, members)
    back = pickle.loads(pickle.dumps(group))
    assert same(group, back)
    assert not same(group.trajectories[0], back.trajectories[1])


def test_a_completion_comes_back_as_it_was() -> None:
    samples = tuple(
        Sample(np.arange(n, dtype=np.int32), -np.arange(n, dtype=np.float32), StopReason.END_OF_TURN) for n in (1, 4, 2)
    )
    completion = Completion("r", np.arange(9, dtype=np.int32), samples, 5, "replica", 0.5, 0.25)
    back = pickle.loads(pickle.dumps(completion))
    assert same(completion, back)
    assert [len(sample.token_ids) for sample in back.samples] == [1, 4, 2]


def test_weights_that_do_not_fit_for_vllm_are_an_error_and_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        plain(path, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    versions = FullVersions(None, None)
    try:
        payload = FullPayload.build(1, {"a": torch.ones(64)}, "base")
        monkeypatch.setattr(Path, "write_bytes", full)
        with pytest.raises(EngineError, match="No space left"):
            versions._put(payload)
        assert not list(versions.root.iterdir())
        monkeypatch.undo()
        assert versions._put(payload).is_file()
    finally:
        versions.close()
