"""`rl-vlm train`: checks, the run folder, and the run that the algorithm asks for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl_vlm.config import RunConfig
from rl_vlm.ownership import RUN_MARKER, clear_run, mark_run
from rl_vlm.runs.preflight import inspect_run
from rl_vlm.types import UserInputError


def default_run_dir(run: RunConfig) -> Path:
    """`runs/<name>`."""
    return Path("runs") / run.name


def prepare_run_dir(folder: Path, resume: bool, overwrite: bool) -> None:
    """Make the run folder. An existing one is refused unless a run in it is to be resumed or overwritten."""
    if folder.exists() and not folder.is_dir():
        raise UserInputError(f"{folder} is a file: choose another --run-dir.")
    if folder.is_dir() and any(folder.iterdir()):
        if resume:
            if not (folder / RUN_MARKER).is_file() and not (folder / "checkpoints").is_dir():
                raise UserInputError(f"{folder} holds no run to resume: choose another --run-dir.")
        elif overwrite:
            clear_run(folder)
        else:
            raise UserInputError(
                f"The run folder {folder} exists: choose another --run-dir, or add --resume or --overwrite."
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        mark_run(folder)
    except OSError as error:
        raise UserInputError(f"Cannot make the run folder {folder}: {error.strerror}.") from error


def train(
    run: RunConfig, run_dir: Path | None = None, *, resume: bool = False, overwrite: bool = False
) -> dict[str, Any]:
    """Run to the end and return the content of `result.json`.

    Raises UserInputError before anything is touched, InterruptedRun after a signal, RLVLMError when the run fails.
    """
    inspect_run(run)
    from rl_vlm.runs.cluster import check_resources, joins_cluster

    if not joins_cluster():
        check_resources(run)
    folder = (run_dir or default_run_dir(run)).absolute()
    prepare_run_dir(folder, resume, overwrite)
    return run.spec.load("run")(run, folder, resume).execute()  # type: ignore[no-any-return]
