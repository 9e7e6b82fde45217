"""Exports what a run trained as a Hugging Face model folder: base weights and adapter merged, or the weights
themselves."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel

from rl_vlm.config.loading import load_yaml
from rl_vlm.files import replace_folder, resolved
from rl_vlm.models.loading import from_folder, load_text_side, quiet_libraries, resolve_model, save_model
from rl_vlm.models.lora import merge_into
from rl_vlm.models.weights import (
    AdapterPayload,
    FullPayload,
    is_full,
    put_weights,
    read_payload,
    trained_folder,
)
from rl_vlm.ownership import MODEL_MARKER, files_in, mark_model, model_files
from rl_vlm.types import RLVLMError, UserInputError


class ExportError(RLVLMError):
    """The exported folder does not hold what was merged."""


def export_model(source: str | Path, out: str | Path, model: str | None = None, overwrite: bool = False) -> Path:
    """Merge the adapter of `source` into its base model, or put the full weights in its place, and write the Hugging
    Face folder `out`, whole or not at all.

    `source` is a run folder (its `adapter/` or `weights/`, and the model that its `config.yaml` names), a folder of
    full weights or a peft adapter folder, which needs `model`: a folder, a hub name or `tiny`. `out` holds weights in
    the base model's own precision, processor and chat template; it is loaded once before it appears. An existing `out`
    is refused without `overwrite`, and even then unless it is empty or a model folder that was written by this
    function; other files in there stay.
    """
    source, out = Path(source).expanduser(), resolved(out)
    adapter, named = find_adapter_and_model(source)
    if not (model or named):
        raise UserInputError(f"{source} does not say which model its adapter belongs to: name it with --model.")
    quiet_libraries()
    base = resolve_model(model or str(named))
    check_target(out, overwrite, keep=(base, adapter))
    payload = read_payload(adapter, 0)
    merged: PreTrainedModel = from_folder(AutoModelForImageTextToText, base, dtype="auto")
    put = merge_into if isinstance(payload, AdapterPayload) else put_weights
    put(merged, payload)
    digests = {name: _digest(tensor) for name, tensor in merged.state_dict().items()}
    with replace_model(out) as draft:
        save_model(merged, draft)
        del merged  # the check below loads the model a second time
        from_folder(AutoProcessor, base).save_pretrained(draft)
        _check_export(draft, digests)
    return out


def find_adapter_and_model(source: Path) -> tuple[Path, str | None]:
    """The adapter folder of a run folder or an adapter folder, and the name of its base model if it is known."""
    if is_full(source):
        return source, _base_of(source)
    if (source / "adapter_config.json").is_file():
        return source, None
    if not source.is_dir():
        raise UserInputError(f"There is no folder {source}: give a run folder or a peft adapter folder.")
    trained = trained_folder(source)
    if trained is None:
        raise UserInputError(
            f"{source} holds neither adapter_config.json nor adapter/: give a run folder or an adapter folder."
        )
    try:
        name = load_yaml((source / "config.yaml").read_text())["model"]["path"]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        name = None
    return trained, name


def _base_of(weights: Path) -> str | None:
    try:
        base = json.loads((weights / FullPayload.CONFIG).read_text())["base_model"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(base)


def check_target(out: Path, overwrite: bool, keep: tuple[Path, ...] = ()) -> None:
    """Raise UserInputError unless a model folder may be written at `out` without harm to `keep` or to foreign files."""
    target = resolved(out)
    for folder in keep:
        if target == folder.resolve() or target in folder.resolve().parents:
            raise UserInputError(f"{out} holds the input {folder}: choose another output folder.")
    if not out.exists():
        return
    if not overwrite:
        raise UserInputError(f"{out} exists already: choose another folder, or replace it with --overwrite.")
    if not out.is_dir() or (any(out.iterdir()) and not model_files(out)):
        raise UserInputError(
            f"{out} exists and is not a model folder that rl-vlm wrote (it has no {MODEL_MARKER}): --overwrite "
            "replaces nothing else."
        )


@contextmanager
def replace_model(out: Path) -> Iterator[Path]:
    """A draft that takes the place of the model folder `out`. Files of an earlier export go, all other files of `out`
    stay.

    Raises UserInputError, with nothing changed, if a file of the user has the name of a new one.
    """

    def foreign(old: Path) -> list[str]:
        names = sorted(set(files_in(old)) - model_files(old))
        taken = [name for name in names if any((draft / path).is_file() for path in (Path(name), *Path(name).parents))]
        if taken:
            raise UserInputError(
                f"{out / taken[0]} is not a file that rl-vlm wrote, and it is in the way: move it first."
            )
        return names

    with replace_folder(out, foreign) as draft:
        yield draft
        mark_model(draft)


def _digest(tensor: Tensor) -> str:
    # numpy knows no bfloat16: hash the bytes.
    data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data
    return hashlib.sha256(data).hexdigest()


def _check_export(folder: Path, digests: dict[str, str]) -> None:
    """Load the folder as a user would and compare every weight."""
    load_text_side(folder)
    model: Any = from_folder(AutoModelForImageTextToText, folder, dtype="auto")
    exported = {name: _digest(tensor) for name, tensor in model.state_dict().items()}
    if exported != digests:
        names = [name for name in digests.keys() | exported.keys() if exported.get(name) != digests.get(name)]
        raise ExportError(
            f"The exported folder came back different in {len(names)} tensors, such as {sorted(names)[0]}."
        )
