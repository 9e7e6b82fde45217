"""The folder of a run: made, rejected, resumed or emptied before anything starts."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from rl_vlm.files import open_own
from rl_vlm.ownership import RUN_MARKER, clear_run, mark_run
from rl_vlm.runs.remote_folder import EXISTS, RemoteFolder, RunDir, is_remote, remote_run_folder
from rl_vlm.runs.surroundings import can_write
from rl_vlm.types import UserInputError
from rl_vlm.waiting import retried

logger = logging.getLogger(__name__)

# Ray unpacks a job's working directory below a folder of this name, and deletes it with the cluster or before.
_JOB_COPIES = "working_dir_files"
_LEAST_FREE = 8 << 20  # bytes; a short run of a tiny model writes 2.4 MB
_PATIENCE_S = 10.0  # with another process that writes to the folder: it may be ending


@contextmanager
def opened_run_folder(run_dir: RunDir, *, resume: bool, overwrite: bool) -> Iterator[Path]:
    """The run folder, absolute, which no other process may open meanwhile. Raises UserInputError."""
    if is_remote(run_dir):
        with remote_run_folder(str(run_dir), resume=resume, overwrite=overwrite) as folder:
            prepare_run_dir(folder, resume, overwrite=False)
            yield folder
        return
    folder = Path(run_dir).absolute()
    check_is_kept(folder)
    marker = folder / RUN_MARKER
    is_run = marker.is_file() and not marker.is_symlink()
    with held(folder) if is_run and (resume or overwrite) else nullcontext():  # before anything is deleted
        prepare_run_dir(folder, resume, overwrite)
        with nullcontext() if is_run else held(folder):
            yield folder


@contextmanager
def held(folder: Path, marker_name: str = RUN_MARKER) -> Iterator[None]:
    """Inside, this process alone has the run folder. Raises UserInputError where another one keeps it."""
    try:
        marker = open_own(folder / marker_name)
    except OSError as error:
        raise UserInputError(f"Cannot write to the run folder {folder}: {error.strerror}.") from error
    with marker:
        try:
            retried(lambda: fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB), (BlockingIOError,), _PATIENCE_S)
        except BlockingIOError as error:
            raise UserInputError(
                f"Another process is writing to the run folder {folder}: wait for its end or stop it, or choose "
                "another --run-dir."
            ) from error
        except OSError:
            logger.debug("%s is on a file system without locks.", folder)
        yield


def check_is_kept(folder: Path) -> None:
    """Raise UserInputError for a folder in a Ray job's copy of its working directory."""
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ and _JOB_COPIES in folder.resolve().parts:
        raise UserInputError(
            f"The run folder {folder} is in the job's own copy of the working directory, which Ray deletes: give "
            "--run-dir a folder that stays, such as one on shared storage, or a URL such as s3://BUCKET/RUN."
        )


def check_run_dir(run_dir: RunDir, resume: bool, overwrite: bool) -> None:
    """Raise UserInputError for a folder that cannot be taken; nothing is changed."""
    if is_remote(run_dir):
        RemoteFolder(str(run_dir), Path())
        return
    folder = Path(run_dir)
    if folder.exists() and not folder.is_dir():
        raise UserInputError(f"{folder} is a file: choose another --run-dir.")
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not can_write(there, 0):
        raise UserInputError(f"Cannot write to {there}: choose another --run-dir than {folder}.")
    if (free := shutil.disk_usage(there).free) < _LEAST_FREE:
        raise UserInputError(f"{there} has {free >> 20} MB left: choose another --run-dir than {folder}, or free some.")
    if not folder.is_dir() or not any(folder.iterdir()) or (overwrite and not resume):
        return
    if not resume:
        raise UserInputError(EXISTS.format(folder))
    if not (folder / RUN_MARKER).is_file() and not (folder / "checkpoints").is_dir():
        raise UserInputError(f"{folder} holds no run to resume: choose another --run-dir.")


def prepare_run_dir(folder: Path, resume: bool, overwrite: bool) -> None:
    check_run_dir(folder, resume, overwrite)
    if overwrite and not resume and folder.is_dir() and any(folder.iterdir()):
        clear_run(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mark_run(folder)
    except OSError as error:
        raise UserInputError(f"Cannot make the run folder {folder}: {error.strerror}.") from error
