"""Checkpoint folders of the preference loop: in the run folder, and all of them under ARTIFACT_ROOT where that is set.

A checkpoint holds `agent.safetensors`, `replay.safetensors`, `reward_model.safetensors` (learned rewards only), `labels/` (hard links
where the file system has them) and `state.json`. Loading one runs no code.
"""

from __future__ import annotations

import filecmp
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rl_vlm.algorithms.checkpoint import (
    check_digests,
    delete_old,
    digests,
    newest_readable,
)
from rl_vlm.algorithms.checkpoint import list_checkpoints as list_folders
from rl_vlm.files import clean_leftovers, link_tree, replace_folder, write_atomic
from rl_vlm.labelling.store import SessionFiles
from rl_vlm.types import UserInputError

AGENT, REPLAY, REWARD_MODEL, LABELS, STATE = (
    "agent.safetensors", "replay.safetensors", "reward_model.safetensors", "labels", "state.json",
)  # fmt: skip
_NAME = re.compile(r"step-(\d{8,})")


class CheckpointFolders:
    """Where the checkpoints of a run go.

    Without ARTIFACT_ROOT the newest `keep` are in `run_folder/checkpoints`. With it every checkpoint stays in
    `$ARTIFACT_ROOT/<run>/checkpoints`, and the run folder gets a copy of the latest alone, in one atomic step.
    """

    def __init__(self, run_folder: Path, run_name: str, keep: int, artifact_root: str | None = None) -> None:
        root = artifact_root if artifact_root is not None else os.environ.get("ARTIFACT_ROOT", "")
        self.artifacts = Path(root) / run_name if root else None
        self._local = run_folder / "checkpoints"
        self._keep = keep
        clean_leftovers(self._local)
        if self.artifacts is not None:
            clean_leftovers(self.artifacts / "checkpoints")

    @property
    def videos(self) -> Path | None:
        """The folder of evaluation videos, if it is not the run folder's."""
        return self.artifacts / "videos" if self.artifacts is not None else None

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Let `write` fill a new checkpoint; returns its folder in the run folder. Raises OSError."""
        target = self._local / f"step-{step:08d}"
        if self.artifacts is None:
            keep = self._keep
            with replace_folder(target) as draft:
                write(draft)
        else:
            keep, kept = 1, self.artifacts / "checkpoints" / target.name
            with replace_folder(kept) as draft:
                write(draft)
            with replace_folder(target) as draft:
                link_tree(kept, draft)
        delete_old(list_checkpoints(self._local), target, keep)
        return target

    def latest(self) -> Path | None:
        """The newest checkpoint of the run folder that is complete."""
        return latest_checkpoint(self._local)


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint in `folder` that is complete, see `newest_readable`; None without any. Raises UserInputError."""
    return newest_readable(list_checkpoints(folder), _check)


def _check(folder: Path) -> None:
    """Raise UserInputError when a checkpoint is incomplete, such as after a power failure, which may cut files short."""
    known = read_state(folder).get("sha256", {})
    for file in folder.glob("*.safetensors"):
        try:
            with safe_open(file, framework="numpy"):  # compares the header with the file's length
                pass
        except (OSError, SafetensorError) as error:
            raise UserInputError(
                f"The checkpoint {folder} is corrupt: {file.name} cannot be read ({error})."
            ) from error
    try:
        check_digests(folder, known)
    except (OSError, TypeError, ValueError) as error:
        raise UserInputError(f"The checkpoint {folder} is corrupt: {error}.") from error


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return list_folders(folder, _NAME)


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write `state.json`, the last file of a checkpoint, which makes it complete."""
    write_atomic(folder / STATE, json.dumps({**state, "sha256": digests(folder)}, sort_keys=True))


def read_state(folder: Path) -> dict[str, Any]:
    """Raises UserInputError when the checkpoint is incomplete."""
    try:
        state: dict[str, Any] = json.loads((folder / STATE).read_text())
    except (OSError, ValueError) as error:
        raise UserInputError(f"The checkpoint {folder} is incomplete or corrupt ({error}).") from error
    return state


def restore_labels(saved: Path, store: SessionFiles) -> None:
    """Copy the sessions of a checkpoint into the run's store.

    A run in another folder lacks them. A Tune trial that goes on from another trial's checkpoint has sessions of its own, which
    are moved aside.
    """
    if not saved.is_dir():
        return
    for session in sorted(saved.glob("session-*.parquet")):
        own = store.folder / session.name
        if own.exists() and not filecmp.cmp(session, own, shallow=False):
            store.supersede(own)
    link_tree(saved, store.folder)
