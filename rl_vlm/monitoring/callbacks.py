"""What a run reports to your own code, named by `logging.callbacks` or given to `rl_vlm.train`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_vlm.envs.loading import load_object
from rl_vlm.types import RLVLMError, UserInputError


class StopTraining(RLVLMError):
    """A callback raises it to end the run, which then evaluates, saves and is done.

    Do: nothing; `stopped_by` in `result.json` is the reason that the callback gave.
    """


class Callback:
    """Derive from it and override what you need. It runs in the driver; `folder` is the run folder.

    Any method may raise StopTraining. Another error ends the run, as an error of its own would.
    """

    def on_iteration(self, folder: Path, iteration: int, metrics: Mapping[str, float]) -> None:
        """After every iteration (SFT: optimiser step), with what `progress.csv` keeps."""

    def on_evaluation(self, folder: Path, iteration: int, results: Mapping[str, Any]) -> None:
        """After every evaluation, with what `eval.jsonl` keeps."""

    def on_checkpoint(self, folder: Path, iteration: int) -> None:
        """After every checkpoint in `folder/checkpoints`."""

    def on_end(self, folder: Path, result: Mapping[str, Any]) -> None:
        """When everything is written, also after an error or Ctrl-C; `result` is `result.json`."""


def load_callbacks(names: Sequence[str]) -> list[Callback]:
    """Callbacks by `path/to/file.py:Name` or `package.module:Name`. Raises UserInputError."""
    found = []
    for name in names:
        callback = load_object(name)
        callback = callback() if isinstance(callback, type) else callback
        if not isinstance(callback, Callback):
            raise UserInputError(f"logging.callbacks: {name} is no rl_vlm.Callback: derive its class from it.")
        found.append(callback)
    return found
