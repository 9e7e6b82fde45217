"""Folders of checkpoints of the preference loop: whole or not at all, the latest beside the run, all of them on scratch.

A checkpoint holds `agent.safetensors`, `replay.safetensors`, `reward_model.safetensors` (learned rewards only), `labels/` (hard links
where the file system has them) and `state.json`. Loading one runs no code.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rl_vlm.algorithms.checkpoint import clean_leftovers
from rl_vlm.files import write_atomic
from rl_vlm.labelling.store import LabelStore
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

    @property
    def videos(self) -> Path | None:
        """Where the pictures of evaluations go, if not into the run folder."""
        return self.artifacts / "videos" if self.artifacts is not None else None

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Let `write` fill a new folder, then make it appear; returns the one in the run folder. Raises OSError."""
        name = f"step-{step:08d}"
        if self.artifacts is None:
            target = _appear(self._local, name, write)
            keep = self._keep
        else:
            kept = _appear(self.artifacts / "checkpoints", name, write)
            target = _appear(self._local, name, lambda folder: _copy(kept, folder))
            keep = 1
        others = [folder for folder in list_checkpoints(self._local) if folder != target]
        for old in others[: max(len(others) + 1 - keep, 0)]:
            shutil.rmtree(old, ignore_errors=True)
        return target

    def latest(self) -> Path | None:
        """The newest checkpoint of the run folder that is complete."""
        return latest_checkpoint(self._local)


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint in `folder` that is complete; None without any."""
    for checkpoint in reversed(list_checkpoints(folder)):
        try:
            read_state(checkpoint)
        except UserInputError:
            continue
        return checkpoint
    return None


def list_checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    if not folder.is_dir():
        return []
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """The last file of a checkpoint: with it the checkpoint is complete."""
    write_atomic(folder / STATE, json.dumps(state, sort_keys=True))


def read_state(folder: Path) -> dict[str, Any]:
    """Raises UserInputError when the checkpoint is incomplete."""
    try:
        state: dict[str, Any] = json.loads((folder / STATE).read_text())
    except (OSError, ValueError) as error:
        raise UserInputError(
            f"The checkpoint {folder} is incomplete or corrupt ({error}): use an older one."
        ) from error
    return state


def link_tree(source: Path, target: Path) -> None:
    """The files of `source` under `target`, as hard links where that is possible. Files of labels are never changed."""
    if source.is_dir():
        shutil.copytree(source, target, copy_function=_link, dirs_exist_ok=True)


def restore_labels(saved: Path, store: LabelStore) -> None:
    """Bring the sessions of a checkpoint into the run's store, if it does not have them (another folder, a Tune trial)."""
    if saved.is_dir() and len(store) < len(LabelStore(saved)):
        link_tree(saved, store.folder)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, target)


def _copy(source: Path, target: Path) -> None:
    link_tree(source, target)


def _appear(parent: Path, name: str, write: Callable[[Path], None]) -> Path:
    parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".writing-", dir=parent))
    temporary.chmod(0o755)  # mkdtemp lets nobody else in
    try:
        write(temporary)
        target = parent / name
        if target.exists():
            shutil.rmtree(target)
        os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target
