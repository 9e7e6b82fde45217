"""What a run trained, as it lies in a folder: an adapter in peft's format, or all weights."""

from __future__ import annotations

from pathlib import Path

from rl_vlm.models.adapter import AdapterPayload
from rl_vlm.models.full_weights import FullPayload
from rl_vlm.models.payload import WeightPayload
from rl_vlm.types import POLICY, UserInputError

_KINDS: tuple[type[AdapterPayload] | type[FullPayload], ...] = (AdapterPayload, FullPayload)


def read_payload(folder: Path, version: int, policy: str = POLICY) -> WeightPayload:
    """Read the version in a folder, of whichever kind it is. Raises UserInputError."""
    return _kind_of(folder).read(folder, version, policy)


def tensors_file(folder: Path) -> Path:
    """The file with the tensors in such a folder."""
    return folder / _kind_of(folder).TENSORS


def _kind_of(folder: Path) -> type[AdapterPayload] | type[FullPayload]:
    return FullPayload if is_full(folder) else AdapterPayload


def is_full(folder: Path) -> bool:
    """Whether a folder holds all weights of a model as a run keeps them, not an adapter."""
    return (folder / FullPayload.CONFIG).is_file()


def trained_folder(run_dir: Path) -> Path | None:
    """The folder inside a run (or a checkpoint) that holds what was trained; None where there is none."""
    found = (run_dir / kind.FOLDER for kind in _KINDS if (run_dir / kind.FOLDER / kind.CONFIG).is_file())
    return next(found, None)


def find_trained(adapter: Path | None, run_dir: Path | None) -> Path | None:
    """The folder of trained weights that a command names directly or by its run folder; None: the base model.

    Raises UserInputError when both are named, or what is named holds neither an adapter nor full weights.
    """
    if adapter is not None and run_dir is not None:
        raise UserInputError("--adapter and --run-dir both name an adapter: give one of them.")
    if run_dir is not None:
        return trained_folder(run_dir) or _refuse(run_dir / AdapterPayload.FOLDER)
    if adapter is not None and not is_full(adapter) and not (adapter / AdapterPayload.CONFIG).is_file():
        return _refuse(adapter)
    return adapter


def _refuse(folder: Path) -> Path:
    raise UserInputError(f"{folder} is not a peft adapter folder: it holds no {AdapterPayload.CONFIG}.")
