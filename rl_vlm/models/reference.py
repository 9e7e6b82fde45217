"""A run's model as every node finds it: in the same folder, or as the node's own equal copy of that name."""

from __future__ import annotations

import hashlib
import socket
from dataclasses import dataclass
from pathlib import Path

from rl_vlm.models.hub import fetch_model
from rl_vlm.models.loading import resolve_model
from rl_vlm.types import RLVLMError, UserInputError


@dataclass(frozen=True, slots=True)
class ModelReference:
    """The model of a run."""

    name: str  # in the configuration
    folder: Path  # on the driver's machine
    digest: str  # `hash_model` of that

    @classmethod
    def of(cls, name: str) -> ModelReference:
        """The model of this name on this machine. Raises UserInputError as `resolve_model` does."""
        folder = resolve_model(name).absolute()
        return cls(name, folder, hash_model(folder))

    def on_this_node(self) -> Path:
        """The model's folder on this machine; one of the hub is downloaded if need be, and a tiny one built.

        Raises UserInputError where no folder here holds what the driver's does.
        """
        if self._is_equal(self.folder):
            return self.folder
        try:
            found = self._by_name()
            if self._is_equal(found):
                return found
            why = f"{found} differs from the driver's copy."
        except RLVLMError as error:
            why = str(error)
        raise UserInputError(
            f"Node {socket.gethostname()} has no copy of the model {self.name}, which is at {self.folder} on the "
            f"driver's machine: {why} Put the model (a tiny one: the folder RL_VLM_CACHE) on a file system that all "
            "nodes mount, or name a model of the hub."
        )

    def _by_name(self) -> Path:
        try:
            return resolve_model(self.name)
        except UserInputError:
            if self.name.count("/") != 1 or self.name.startswith((".", "/", "~")):
                raise
            return fetch_model(self.name)  # the hub's client locks: one process of a node downloads, the others wait

    def _is_equal(self, folder: Path) -> bool:
        try:
            return hash_model(folder) == self.digest
        except OSError:
            return False


_TEXT = (".json", ".jinja", ".txt")
_PIECE_BYTES, _PIECES = 4096, 1024  # of a file of weights, evenly spread


def hash_model(folder: Path) -> str:
    """A hash of a model folder's text files and of 4 MiB of each weight file, in milliseconds for gigabytes.

    It differs for a merged adapter or a trained model, but not for an edit of single numbers. Raises OSError.
    """
    digest = hashlib.sha256()
    for file in sorted(folder.iterdir()):
        if file.suffix not in (*_TEXT, ".safetensors") or file.name.startswith(".") or not file.is_file():
            continue
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb", buffering=_PIECE_BYTES) as stream:
            if file.suffix in _TEXT:
                digest.update(stream.read())
                continue
            for number in range(_PIECES):
                stream.seek(max(size - _PIECE_BYTES, 0) * number // (_PIECES - 1))
                digest.update(stream.read(_PIECE_BYTES))
    return digest.hexdigest()[:16]
