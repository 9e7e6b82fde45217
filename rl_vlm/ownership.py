"""Which files of a folder are ours, so that `--overwrite` may delete them: the names that a run writes in a folder with
its marker, and the files that the marker of an exported model lists."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from rl_vlm.types import UserInputError

RUN_MARKER, MODEL_MARKER = ".rl_vlm_run", ".rl_vlm_model"
_NOTE = "rl-vlm train wrote this folder. --overwrite deletes the files that a run writes, and nothing else.\n"
_IMAGE = r"[0-9a-f]{64}\.png"
_WEIGHTS = r"[\w-]+\.(safetensors|json)"
_TRAINED = "(adapter|weights)"  # folders, see WeightPayload.FOLDER
_LABELS = rf"labels/(session-\d+\.parquet|superseded/session-[\d-]+\.parquet|images/{_IMAGE})"
_CHECKPOINT = r"checkpoints/((iteration|step)-\d+|\.(writing|replaced)-[\w-]+)"
_RUN_FILE = re.compile(
    "|".join(
        (
            re.escape(RUN_MARKER),
            r"config\.yaml|progress\.csv|train\.csv|eval\.csv|eval\.jsonl|vlm_query_log\.csv|result\.json|curve\.png",
            r"failures\.jsonl|messages\.jsonl|startup\.log|error\.log|wandb_id\.txt|events\.out\.tfevents\.[^/]+",
            rf"trajectories/(iteration-\d+\.parquet|images/{_IMAGE})",
            r"evaluations/iteration-\d+\.parquet",
            r"videos/step\d+_episode\d+_[^/]+\.gif",
            r"traces/iteration-\d+\.jsonl",
            _LABELS,
            rf"(\.(writing|replaced)-)?{_TRAINED}(-\w+)*/{_WEIGHTS}",
            rf"{_CHECKPOINT}/(({_TRAINED}/)?{_WEIGHTS}|{_LABELS})",
            r"([\w/-]+/)?\.[^/]+-[0-9a-f]{8}\.tmp|\.config\.yaml-\w+",  # of a writer that was killed
        )
    )
)
_RUN_FOLDERS = (
    "adapter", "adapter-ema", "checkpoints", "evaluations", "labels", "serving", "traces", "trajectories", "videos", "weights", "weights-ema",  # noqa: E501
)  # fmt: skip


def mark_run(folder: Path) -> None:
    if (folder / RUN_MARKER).is_symlink():
        (folder / RUN_MARKER).unlink()  # not to write to what it leads to
    (folder / RUN_MARKER).write_text(_NOTE)


def clear_run(folder: Path) -> None:
    """Delete the files that a run wrote, its marker excepted. Raises UserInputError first if it is no run."""
    if not (folder / RUN_MARKER).is_file():
        raise UserInputError(
            f"{folder} has no {RUN_MARKER}, so it is not known to be a run, and --overwrite deletes nothing in it: "
            "delete it yourself, or choose another --run-dir."
        )
    for name in _RUN_FOLDERS:
        if (folder / name).is_symlink():
            raise UserInputError(f"{folder / name} is a link: delete it and what it names yourself.")
    # Without the marker, which may be locked: after a failure the rest is still known as a run.
    for name in set(run_files(folder)) - {RUN_MARKER}:
        path = folder / name
        path.unlink(missing_ok=True)
        for parent in path.relative_to(folder).parents[:-1]:  # folders that are empty now
            if any((folder / parent).iterdir()):
                break
            (folder / parent).rmdir()


def run_files(folder: Path) -> list[str]:
    """The files below the folder of a run, relative to it, that have names that a run writes."""
    return [name for name in files_in(folder) if _RUN_FILE.fullmatch(name)]


def mark_model(folder: Path) -> None:
    names = [name for name in files_in(folder) if name != MODEL_MARKER]
    (folder / MODEL_MARKER).write_text(json.dumps([*names, MODEL_MARKER], indent=1))


def model_files(folder: Path) -> frozenset[str]:
    """The files that the marker of a model folder lists, relative to it; none without a readable marker."""
    try:
        listed = json.loads((folder / MODEL_MARKER).read_text())
    except (OSError, ValueError):
        return frozenset()
    return frozenset(name for name in listed if isinstance(name, str)) if isinstance(listed, list) else frozenset()


def files_in(folder: Path) -> list[str]:
    """Everything below a folder that is not a folder itself, relative to it, sorted; links are not followed."""
    found = []
    for parent, folders, files in os.walk(folder):
        links = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        found += [Path(parent, name).relative_to(folder).as_posix() for name in (*files, *links)]
    return sorted(found)
