"""Checkpoints: complete or not there, the same bytes back, and training goes on as if it had never stopped."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from core_support import adapted_policy, run_config

from rl_vlm.algorithms import checkpoint as module
from rl_vlm.algorithms.checkpoint import (
    Checkpoint,
    latest_checkpoint,
    list_checkpoints,
    read_checkpoint,
    write_checkpoint,
)
from rl_vlm.files import clean_leftovers
from rl_vlm.learning.policy_model import PolicyModel
from rl_vlm.learning.strategies import Strategy
from rl_vlm.models.weights import AdapterPayload
from rl_vlm.types import UserInputError

FILES = ["state.json", "optimizer.safetensors", "adapter/adapter_model.safetensors", "adapter/adapter_config.json"]


@pytest.fixture(scope="module")
def payload(tiny_folder: Path) -> AdapterPayload:
    return adapted_policy(tiny_folder).payload(17)


def make(payload: AdapterPayload, **state: Any) -> Checkpoint:
    moments = {
        "exp_avg.0": torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),
        "exp_avg_sq.0": torch.full((2,), 1e-30, dtype=torch.bfloat16),
        "step.0": torch.tensor(7.0),
    }
    rng = np.random.default_rng(3).bit_generator.state
    return Checkpoint(payload, moments, {"updates": 5, "rng": rng, "share": 0.1 + 0.2, **state})


def save_checkpoint(folder: Path, iteration: int, checkpoint: Checkpoint, keep: int) -> Path:
    return module.save_checkpoint(
        folder, f"iteration-{iteration:06d}", lambda draft: write_checkpoint(draft, checkpoint), keep
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- writing and reading


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("no space left")])
def test_a_checkpoint_that_is_written_again_is_never_lost(
    payload: AdapterPayload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    save_checkpoint(tmp_path, 5, make(payload, share=0.5), keep=1)
    real = os.replace

    def fails(source: Any, target: Any) -> None:
        if Path(source).name.startswith(".writing-"):
            raise error
        real(source, target)

    with monkeypatch.context() as patch, pytest.raises(type(error)):
        patch.setattr(module.os, "replace", fails)
        save_checkpoint(tmp_path, 5, make(payload, share=0.25), keep=1)
    assert names(tmp_path) == ["iteration-000005"]
    assert read_checkpoint(tmp_path / "iteration-000005").state["share"] == 0.5
    save_checkpoint(tmp_path, 5, make(payload, share=0.25), keep=1)
    assert names(tmp_path) == ["iteration-000005"]
    assert read_checkpoint(tmp_path / "iteration-000005").state["share"] == 0.25


@pytest.mark.parametrize("placed", [False, True])
def test_a_writer_that_was_killed_between_its_renames_leaves_a_checkpoint(
    payload: AdapterPayload, tmp_path: Path, placed: bool
) -> None:
    target = save_checkpoint(tmp_path, 5, make(payload, share=0.5), keep=1)
    target.rename(tmp_path / ".replaced-iteration-000005")
    if placed:
        save_checkpoint(tmp_path, 5, make(payload, share=0.25), keep=1)
    clean_leftovers(tmp_path)
    assert names(tmp_path) == ["iteration-000005"]
    assert read_checkpoint(target).state["share"] == (0.25 if placed else 0.5)


def test_a_checkpoint_comes_back_byte_for_byte(payload: AdapterPayload, tmp_path: Path) -> None:
    saved = make(payload)
    folder = save_checkpoint(tmp_path, 12, saved, keep=3)
    assert folder.name == "iteration-000012"
    back = read_checkpoint(folder)
    assert back.adapter == payload == AdapterPayload.read(folder / "adapter", 17)  # as peft has it
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == sorted(FILES)
    assert back.moments.keys() == saved.moments.keys()
    for name, tensor in saved.moments.items():
        assert back.moments[name].dtype == tensor.dtype
        assert torch.equal(back.moments[name], tensor)
    assert {key: back.state[key] for key in saved.state} == saved.state
    assert back.state["share"] == 0.1 + 0.2  # every bit
    generator = np.random.default_rng()
    generator.bit_generator.state = back.state["rng"]
    assert generator.random() == np.random.default_rng(3).random()
    again = save_checkpoint(tmp_path / "again", 12, back, keep=3)
    for name in FILES:
        assert (again / name).read_bytes() == (folder / name).read_bytes()


# --- retention


def test_only_the_newest_are_kept_and_other_files_are_left_alone(payload: AdapterPayload, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "iteration-best").mkdir()
    for iteration in (1, 2, 1_000_000, 999_999):
        save_checkpoint(tmp_path, iteration, make(payload), keep=3)
    kept = ["iteration-000002", "iteration-999999", "iteration-1000000"]
    assert names(tmp_path) == sorted([*kept, "iteration-best", "notes.txt"])
    assert [path.name for path in list_checkpoints(tmp_path)] == kept  # ordered as numbers
    assert latest_checkpoint(tmp_path) == tmp_path / "iteration-1000000"


def test_the_checkpoint_just_written_is_never_the_one_deleted(payload: AdapterPayload, tmp_path: Path) -> None:
    """A run that resumed from before a damaged checkpoint writes lower numbers than the damaged one has."""
    damaged = save_checkpoint(tmp_path, 50, make(payload), keep=1)
    (damaged / "state.json").unlink()
    written = save_checkpoint(tmp_path, 40, make(payload), keep=1)
    assert latest_checkpoint(tmp_path) == written


# --- what a kill, a bad disk or a full one leaves


DAMAGE: dict[str, Callable[[Path], None]] = {
    "empty": lambda file: file.write_bytes(b""),
    "half": lambda file: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "almost whole": lambda file: file.write_bytes(file.read_bytes()[:-1]),
    "missing": Path.unlink,
    "zeros": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "a flipped bit": lambda file: file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1])),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
@pytest.mark.parametrize("name", [*FILES[:3], "learner.safetensors"])
def test_a_damaged_checkpoint_is_passed_over(
    payload: AdapterPayload, tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    checkpoint = make(payload)
    checkpoint.extras = {"critic.weight": torch.ones(3)}
    good, bad = (save_checkpoint(tmp_path, iteration, checkpoint, keep=9) for iteration in (1, 2))
    assert latest_checkpoint(tmp_path) == bad
    damage(bad / name)
    with pytest.raises(UserInputError, match=r"iteration-000002 is (incomplete or )?corrupt"):
        read_checkpoint(bad)
    assert latest_checkpoint(tmp_path) == good


@pytest.mark.parametrize("text", ["null", "[]", "3", "{}", '{"version": 17}', '{"version": 17, "sha256": 3}'])
def test_a_state_that_is_no_state_is_corrupt(payload: AdapterPayload, tmp_path: Path, text: str) -> None:
    folder = save_checkpoint(tmp_path, 1, make(payload), keep=1)
    (folder / "state.json").write_text(text)
    with pytest.raises(UserInputError, match="corrupt"):
        read_checkpoint(folder)


def test_what_a_killed_writer_leaves_is_not_a_checkpoint(payload: AdapterPayload, tmp_path: Path) -> None:
    good = save_checkpoint(tmp_path, 1, make(payload), keep=3)
    shutil.copytree(good, tmp_path / ".writing-abc")  # killed just before the rename
    (tmp_path / ".writing-def").mkdir()
    assert list_checkpoints(tmp_path) == [good]
    assert latest_checkpoint(tmp_path) == good
    clean_leftovers(tmp_path)
    assert names(tmp_path) == ["iteration-000001"]
    clean_leftovers(tmp_path / "nowhere")
    assert latest_checkpoint(tmp_path / "nowhere") is None


@pytest.mark.parametrize("after", range(4))
def test_a_full_disk_leaves_the_older_checkpoints(
    payload: AdapterPayload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    good = save_checkpoint(tmp_path, 1, make(payload), keep=1)
    fsync, count = os.fsync, 0

    def full(descriptor: int) -> None:
        nonlocal count
        count += 1
        if count > after:
            os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            raise OSError(28, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    for iteration in (1, 2):
        count = 0
        with pytest.raises(OSError, match="No space"):
            save_checkpoint(tmp_path, iteration, make(payload), keep=1)
    assert names(tmp_path) == ["iteration-000001"]
    assert latest_checkpoint(tmp_path) == good


def test_a_run_of_which_no_checkpoint_reads_is_not_begun_anew(
    payload: AdapterPayload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_checkpoint(tmp_path, 1, make(payload), keep=9)

    def stale(self: Path, *_: object, **__: object) -> str:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "read_text", stale)
    with pytest.raises(UserInputError, match="Stale file handle.* None of the 1 can be read: .*--overwrite"):
        latest_checkpoint(tmp_path)


def test_moments_of_another_optimiser_and_another_critic_are_refused(tiny_folder: Path) -> None:
    weights = [torch.nn.Parameter(torch.ones(4, 3))]
    for optimizer, name in ((torch.optim.Adafactor(weights), "exp_avg.0"), (torch.optim.AdamW(weights), "row_var.0")):
        strategy = Strategy(None, optimizer)  # type: ignore[arg-type]
        with pytest.raises(UserInputError, match="keep learner.optimizer as it was"):
            strategy.restore({name: torch.zeros(4, 3), "step.0": torch.tensor(1.0)})
    critic = PolicyModel(tiny_folder, run_config(tiny_folder, algorithm__name="ppo")).critic
    assert critic is not None
    with pytest.raises(UserInputError, match="keep algorithm.name and critic as they were"):
        critic.restore({})
