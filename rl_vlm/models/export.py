"""Exports what a run trained as a Hugging Face model folder: base weights and adapter merged, or all weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml
from transformers import AutoModelForImageTextToText, AutoProcessor, PreTrainedModel

from rl_vlm.config.yaml_text import load_yaml
from rl_vlm.files import replace_folder, resolved
from rl_vlm.models.loading import quiet_libraries, resolve_model, save_model
from rl_vlm.models.lora import merge_into
from rl_vlm.models.modules import from_folder
from rl_vlm.models.trained import check_trained, find_trained, is_full, read_payload
from rl_vlm.models.weights import FullPayload
from rl_vlm.ownership import MODEL_MARKER, files_in, mark_model, model_files
from rl_vlm.types import UserInputError


def export_model(source: str | Path, out: str | Path, model: str | None = None, overwrite: bool = False) -> Path:
    """Write the Hugging Face folder `out`, whole or not at all, with weights in the base model's own precision.

    `source` is a run folder (its `adapter/` or `weights/`, and the model that its `config.yaml` names), a folder of
    full weights or a peft adapter folder, which needs `model`: a folder, a hub name or `tiny`. With `overwrite` an
    existing `out` must be empty or written by this function; other files in there stay. Raises UserInputError.
    """
    source, out = Path(source).expanduser(), resolved(out)
    adapter, named = find_trained_and_model(source)
    if not (model or named):
        raise UserInputError(f"{source} does not say which model its adapter belongs to: name it with --model.")
    quiet_libraries()
    base = resolve_model(model or str(named))
    check_target(out, overwrite, keep=(base, adapter))
    check_trained(adapter, str(base))
    merged: PreTrainedModel = from_folder(AutoModelForImageTextToText, base, dtype="auto")
    merge_into(merged, read_payload(adapter, 0))
    with replace_model(out) as draft:
        save_model(merged, draft)
        from_folder(AutoProcessor, base).save_pretrained(draft)
    return out


def find_trained_and_model(source: Path) -> tuple[Path, str | None]:
    """The folder of trained weights that a folder or a run holds, and the name of its base model if it is known."""
    trained = find_trained(source)
    assert trained is not None
    try:
        if is_full(trained):
            return trained, json.loads((trained / FullPayload.CONFIG).read_text())["base_model"]
        return trained, load_yaml((source / "config.yaml").read_text())["model"]["path"]
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
        return trained, None


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
    """A draft that takes the place of the model folder `out`, where only files of an earlier export go. Raises
    UserInputError, with nothing changed, if a file of the user has the name of a new one."""

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
