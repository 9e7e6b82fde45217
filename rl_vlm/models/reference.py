"""A run's model as every node finds it: the same folder, the node's own copy by name, or the driver's files.

The folder of the driver's machine means nothing on another node. What is small there (the text side of every model, all of
a tiny one) travels; large weights come from the node's own copy of the same name, which must be equal.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rl_vlm.files import cache_folder, locked
from rl_vlm.models.digest import WEIGHTS, hash_model, text_files
from rl_vlm.models.loading import builtin_models, resolve_model
from rl_vlm.types import UserInputError

_SMALL_FILE, _SMALL_FOLDER = 32 << 20, 96 << 20  # bytes of weights that travel at most


@dataclass(frozen=True, slots=True)
class ModelReference:
    """The model of a run: its name in the configuration, its folder on the driver's machine, and `hash_model` of that."""

    name: str
    folder: Path
    digest: str

    @classmethod
    def of(cls, name: str) -> ModelReference:
        """The model of this name on this machine. Raises UserInputError as `resolve_model` does."""
        folder = resolve_model(name)
        return cls(name, folder, hash_model(folder))

    def on_this_node(self, fetch_files: Callable[[], Mapping[str, bytes]], *, weights: bool = True) -> Path:
        """The model's folder on this machine; without `weights` it may hold configuration, tokenizer and processor only.

        Args:
            fetch_files: gives `travelling_files` of the driver's folder; called where nothing equal is here.

        Raises UserInputError when the weights are needed and neither here nor small enough to travel.
        """
        if _is_equal(self.folder, self.digest):
            return self.folder
        found, why = self._by_name()
        if found is not None:
            return found
        cache = cache_folder()
        for kind in ("model", "text") if not weights else ("model",):
            if (copied := cache / f"{kind}-{self.digest}").is_dir():
                return copied
        files = fetch_files()
        has_weights = any(name.endswith(WEIGHTS) for name in files)
        if weights and not has_weights:
            raise UserInputError(f"Node {socket.gethostname()} cannot load the model {self.name}: {why}")
        folder = cache / f"{'model' if has_weights else 'text'}-{self.digest}"
        _write_folder(folder, files)
        return folder

    def _by_name(self) -> tuple[Path | None, str]:
        """The node's own equal copy, or why there is none."""
        if self.name in builtin_models():  # built on the driver; another processor may round differently
            return None, "its files did not arrive."
        try:
            found = self._download_or_find()
        except UserInputError as error:
            return None, str(error)
        if hash_model(found) != self.digest:
            return None, f"{found} there differs from the driver's folder: fetch the same revision, whole, on both."
        return found, ""

    def _download_or_find(self) -> Path:
        try:
            return resolve_model(self.name)
        except UserInputError as error:
            offline = os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes", "on")
            if offline or self.name.count("/") != 1 or self.name.startswith((".", "/", "~")):
                raise
            from rl_vlm.models.hub import fetch_model
            from rl_vlm.types import RLVLMError

            try:
                return fetch_model(
                    self.name
                )  # the hub's client locks: one process of a node downloads, the others wait
            except RLVLMError as failure:
                raise UserInputError(f"{error} {failure}") from failure


def travelling_files(folder: Path) -> dict[str, bytes]:
    """The files of a model folder that are sent to other nodes, by name: configuration and text side, and small weights."""
    weights = {path.name: path.stat().st_size for path in folder.glob(f"*{WEIGHTS}")}
    if sum(weights.values()) > _SMALL_FOLDER or any(size > _SMALL_FILE for size in weights.values()):
        weights = {}  # some of them would be of no use
    return {name: (folder / name).read_bytes() for name in sorted([*text_files(folder), *weights])}


def _is_equal(folder: Path, digest: str) -> bool:
    try:
        return hash_model(folder) == digest
    except OSError:
        return False


def _write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the folder, which appears complete or not at all; processes of one machine take turns."""
    with locked(folder.with_name(f"{folder.name}.lock")):
        if folder.is_dir():
            return
        draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            for name, content in files.items():
                if Path(name).name != name:
                    raise ValueError(f"{name!r} is no file name")
                (draft / name).write_bytes(content)
            draft.chmod(0o755)
            draft.rename(folder)
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)
            raise
