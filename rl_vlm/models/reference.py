"""A run's model as every node finds it: in the same folder, or in the node's own copy of that name, which must be
equal."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from rl_vlm.models.digest import hash_model
from rl_vlm.models.hub import fetch_model
from rl_vlm.models.loading import resolve_model
from rl_vlm.types import RLVLMError, UserInputError


@dataclass(frozen=True, slots=True)
class ModelReference:
    """The model of a run: its name in the configuration, its folder on the driver's machine, and `hash_model` of
    that."""

    name: str
    folder: Path
    digest: str

    @classmethod
    def of(cls, name: str) -> ModelReference:
        """The model of this name on this machine. Raises UserInputError as `resolve_model` does."""
        folder = resolve_model(name).absolute()
        return cls(name, folder, hash_model(folder))

    def on_this_node(self) -> Path:
        """The model's folder on this machine; one of the hub is downloaded if need be, and a tiny one built.

        Raises UserInputError where no folder here holds what the driver's does.
        """
        if _is_equal(self.folder, self.digest):
            return self.folder
        try:
            found = self._by_name()
            if _is_equal(found, self.digest):
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


def _is_equal(folder: Path, digest: str) -> bool:
    try:
        return hash_model(folder) == digest
    except OSError:
        return False
