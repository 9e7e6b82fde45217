"""Checkpoints of a run: weights and other tensors as safetensors, everything else as JSON in `state.json`.

A checkpoint appears complete or not at all, and loading one runs no code. `state.json` is written last and holds a
digest of each file of tensors.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from rl_vlm.files import link_tree, replace_folder
from rl_vlm.models.tensor_bytes import file_digest, write_tensors
from rl_vlm.models.trained import read_payload, trained_folder
from rl_vlm.models.weights import AdapterPayload, WeightPayload
from rl_vlm.types import UserInputError

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_NAME = re.compile(r"(?:iteration|step)-(\d{6,})")
_STATE = "state.json"
AGENT = "agent.safetensors"  # of a preference run: the learner's tensors


@dataclass(slots=True)
class Checkpoint:
    """What a policy run (and supervised fine-tuning) saves: the adapter (or all weights), the optimiser's moments by
    name, the algorithm's state, and further tensors of the learners (a critic, averaged weights)."""

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
    more = {"version": weights.version, "adapter_sha256": weights.sha256, "extras": bool(checkpoint.extras)}
    write_state(folder, {**checkpoint.state, **more})


def read_checkpoint(folder: Path) -> Checkpoint:
    """Read a checkpoint folder. Raises UserInputError when it is incomplete or corrupt."""
    from safetensors.torch import load_file

    state = read_state(folder)
    try:
        adapter = read_payload(trained_folder(folder) or folder / AdapterPayload.FOLDER, state["version"])
        if adapter.sha256 != state["adapter_sha256"]:
            raise ValueError("its adapter has another SHA-256 than when it was written")
        moments = load_file(folder / "optimizer.safetensors")
        extras = load_file(folder / "learner.safetensors") if state["extras"] else {}
    except (OSError, ValueError, TypeError, KeyError, SafetensorError, UserInputError) as error:
        raise UserInputError(f"The checkpoint {folder} is incomplete or corrupt ({error}).") from error
    return Checkpoint(adapter, moments, state, extras)


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write the last file of a checkpoint. Raises OSError."""
    digests = {file.name: file_digest(file) for file in sorted(folder.glob("*.safetensors"))}
    _write(folder / _STATE, json.dumps({**state, "sha256": digests}, sort_keys=True, indent=1).encode())


def read_state(folder: Path) -> dict[str, Any]:
    """The state of a checkpoint. Raises UserInputError when it is incomplete, or a file of tensors has changed."""
    try:
        state: dict[str, Any] = json.loads((folder / _STATE).read_text())
        for name, digest in dict(state.pop("sha256")).items():
            if file_digest(folder / name) != digest:
                raise ValueError(f"{name} has another SHA-256 than when it was written")
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserInputError(f"The checkpoint {folder} is incomplete or corrupt ({error}).") from error
    return state


def save_checkpoint(
    checkpoints: Path, name: str, write: Callable[[Path], None], keep: int, history: Path | None = None
) -> Path:
    """Let `write` fill `checkpoints/<name>`, which appears complete, then delete all but the newest `keep`. With
    `history` every checkpoint stays there, and `checkpoints` gets a copy of the latest. Raises OSError."""
    target = checkpoints / name
    with replace_folder(target if history is None else history / name) as draft:
        write(draft)
    if history is not None:
        keep = 1
        with replace_folder(target) as draft:
            link_tree(history / name, draft)
    # A run that was resumed from an older checkpoint may have left higher numbers behind.
    others = [folder for folder in list_checkpoints(checkpoints) if folder != target]
    for old in others[: max(len(others) + 1 - keep, 0)]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def checkpoint_number(folder: Path) -> int:
    return int(folder.name.rpartition("-")[2])


def list_checkpoints(checkpoints: Path) -> list[Path]:
    """Checkpoints, oldest first."""
    if not checkpoints.is_dir():
        return []
    return sorted((path for path in checkpoints.iterdir() if _NAME.fullmatch(path.name)), key=checkpoint_number)


def latest_checkpoint(checkpoints: Path, read: Callable[[Path], object] = read_checkpoint) -> Path | None:
    """The newest checkpoint that `read` accepts, with a warning for each that is passed over; None without any.
    Raises UserInputError when none can be read: beginning anew would delete the run's history."""
    passed: list[str] = []
    for folder in reversed(list_checkpoints(checkpoints)):
        try:
            read(folder)
        except UserInputError as error:
            passed.append(str(error))
        else:
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
