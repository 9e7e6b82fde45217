"""Checkpoints of a run: adapter in peft's format or all weights, optimiser moments as safetensors, everything else as JSON.

A checkpoint appears complete or not at all, and loading one runs no code.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from rl_vlm.files import replace_folder
from rl_vlm.models.weights import (
    AdapterPayload,
    WeightPayload,
    file_digest,
    read_payload,
    trained_folder,
    write_tensors,
)
from rl_vlm.types import UserInputError

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_NAME = re.compile(r"iteration-(\d{6,})")


@dataclass(slots=True)
class Checkpoint:
    """What a checkpoint holds: the adapter (or all weights), the optimiser's moments by name, the algorithm's state, and further tensors
    of the learners (a critic, averaged weights)."""

    adapter: WeightPayload
    moments: dict[str, Tensor]
    state: dict[str, Any]
    extras: dict[str, Tensor] = field(default_factory=dict)


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write all files into `folder`, which exists. Not atomic: see `replace_folder`."""
    import torch

    weights = checkpoint.adapter
    (folder / weights.FOLDER).mkdir(exist_ok=True)
    _write(folder / weights.FOLDER / weights.TENSORS, weights.tensors)
    _write(folder / weights.FOLDER / weights.CONFIG, weights.config_json.encode())
    moments = {name: torch.as_tensor(value) for name, value in checkpoint.moments.items()}
    write_tensors(folder / "optimizer.safetensors", moments)
    if checkpoint.extras:
        write_tensors(folder / "learner.safetensors", checkpoint.extras)
    state = {
        **checkpoint.state,
        "version": checkpoint.adapter.version,
        "adapter_sha256": checkpoint.adapter.sha256,
        "extras": bool(checkpoint.extras),
        "sha256": digests(folder),
    }
    _write(folder / "state.json", json.dumps(state, sort_keys=True, indent=1).encode())


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint folder. Raises UserInputError when it is incomplete or corrupt."""
    from safetensors.torch import load_file

    try:
        state = json.loads((folder / "state.json").read_text())
        version, known = state["version"], state.pop("sha256", {})
        check_digests(folder, known)
        adapter = read_payload(trained_folder(folder) or folder / AdapterPayload.FOLDER, version)
        moments = load_file(folder / "optimizer.safetensors")
        extras = load_file(folder / "learner.safetensors") if state.get("extras") else {}
        sha256 = state["adapter_sha256"]
    except (OSError, ValueError, TypeError, KeyError, SafetensorError, UserInputError) as error:
        raise UserInputError(f"The checkpoint {folder} is incomplete or corrupt ({error}).") from error
    # Full weights of several gigabytes had the plain SHA-256 before it was computed in pieces.
    if adapter.sha256 != sha256 and hashlib.sha256(adapter.tensors).hexdigest() != sha256:
        raise UserInputError(f"The checkpoint {folder} is corrupt: its adapter has another SHA-256.")
    return Checkpoint(adapter, moments, state, extras)


def digests(folder: Path) -> dict[str, str]:
    """A digest of each file of tensors that lies in the folder itself, by name (see `file_digest`). Raises OSError."""
    return {file.name: file_digest(file) for file in sorted(folder.glob("*.safetensors"))}


def check_digests(folder: Path, known: Mapping[str, str]) -> None:
    """Compare the files with what `digests` said of them; older checkpoints know none. Raises OSError, TypeError and ValueError."""
    for name, digest in dict(known).items():
        if file_digest(folder / name) != digest:
            raise ValueError(f"{name} has another SHA-256 than when it was written")


def save_checkpoint(checkpoints: Path, iteration: int, checkpoint: Checkpoint, keep: int) -> Path:
    """Write `checkpoints/iteration-000123` atomically, then delete all but the newest `keep`. Raises OSError."""
    target = checkpoints / f"iteration-{iteration:06d}"
    with replace_folder(target) as draft:
        write_checkpoint(draft, checkpoint)
    delete_old(list_checkpoints(checkpoints), target, keep)
    return target


def delete_old(checkpoints: list[Path], written: Path, keep: int) -> None:
    """Delete the oldest checkpoints, so that `keep` stay.

    `written` always stays, also where a higher number is left over from before the run was resumed.
    """
    others = [folder for folder in checkpoints if folder != written]
    for old in others[: max(len(others) + 1 - keep, 0)]:
        shutil.rmtree(old, ignore_errors=True)


def list_checkpoints(checkpoints: Path, name: re.Pattern[str] = _NAME) -> list[Path]:
    """Complete checkpoints, oldest first; `name` matches their names, with the number as its first group."""
    if not checkpoints.is_dir():
        return []
    found = [(int(match[1]), path) for path in checkpoints.iterdir() if (match := name.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def latest_checkpoint(checkpoints: Path) -> Path | None:
    """The newest checkpoint that reads back whole, see `newest_readable`."""
    return newest_readable(list_checkpoints(checkpoints), read_checkpoint)


def newest_readable(checkpoints: Sequence[Path], read: Callable[[Path], object]) -> Path | None:
    """The last of the checkpoints that `read` accepts; None without any. People are told of those that are passed over.

    Raises UserInputError when there are some and none can be read: beginning anew would delete the run's history.
    """
    passed: list[str] = []
    for folder in reversed(checkpoints):
        try:
            read(folder)
        except UserInputError as error:
            passed.append(str(error))
            continue
        for reason in passed:
            logger.warning("%s %s is taken instead.", reason, folder.name)
        return folder
    if passed:
        raise UserInputError(
            f"{passed[0]} None of the {len(passed)} can be read: mend the storage, or begin anew with --overwrite."
        )
    return None


def _write(path: Path, data: bytes | memoryview) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
