"""The base of training runs: heeds signals and callbacks, saves checkpoints, and always writes a result."""

from __future__ import annotations

import json
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl_vlm.algorithms.checkpoint import checkpoint_number, latest_checkpoint, read_checkpoint, save_checkpoint
from rl_vlm.config import SFTConfig, TrainConfig, save_config
from rl_vlm.config.loading import changes_since
from rl_vlm.files import clean_leftovers
from rl_vlm.models.weights import WeightPayload
from rl_vlm.monitoring.callbacks import StopTraining, load_callbacks
from rl_vlm.monitoring.display import POLICY_ROWS, ProgressDisplay, Rows
from rl_vlm.monitoring.recorder import RunRecorder
from rl_vlm.runs.signals import InterruptedRun, StopRequest
from rl_vlm.types import RLVLMError, UserInputError

# What a resumed run may not change, each with a point at its end.
_FIXED = (
    "env.id.", "env.kwargs.", "env.data.", "env.mixture.", "env.reward.", "model.path.", "model.train.",
    "model.lora.rank.", "model.lora.target_modules.",
    "algorithm.name.", "preference.reward.", "sft.data.",
)  # fmt: skip


def changed_settings(folder: Path, config: TrainConfig | SFTConfig) -> str:
    """What a run that goes on has otherwise than before, as a sentence. Raises UserInputError for a setting that
    changes what is learned."""
    saved = folder / "config.yaml"
    if saved.is_file() and not saved.stat().st_size:
        raise UserInputError(f"{saved} is empty: restore it, or begin anew with --overwrite.")
    changes = changes_since(saved, config) if saved.is_file() else {}
    sentences = {key: f"{key} {before} → {now}" for key, (before, now) in changes.items()}
    fixed = [text for key, text in sentences.items() if f"{key}.".startswith(_FIXED)]
    if fixed:
        raise UserInputError(
            f"The run in {folder} cannot go on with other settings ({', '.join(fixed)}): leave these overrides out and "
            f"give {folder} in place of the configuration, repeat those it began with, or choose another --run-dir."
        )
    return f"Going on with other settings: {', '.join(sentences.values())}." if sentences else ""


class BaseRun(ABC):
    """One command that trains. The constructor raises UserInputError where the newest checkpoint does not fit."""

    config: TrainConfig | SFTConfig
    _unit = "iteration"  # what `_position` counts
    _length = "algorithm.iterations"  # the key of how many
    _rows: Rows = POLICY_ROWS  # of the display
    _checkpoint_name = "iteration-{:06d}"
    _history: Path | None = None  # where all checkpoints stay, beside the newest ones in the run folder
    _read_checkpoint: Callable[[Path], object] = staticmethod(read_checkpoint)

    def __init__(self, config: TrainConfig | SFTConfig, folder: Path, resume: bool, total: int) -> None:
        self.config, self.folder, self.total, self._resumes = config, folder, total, resume
        self.checkpoints = folder / "checkpoints"
        clean_leftovers(folder)
        clean_leftovers(self.checkpoints)
        self.start_from = latest_checkpoint(self.checkpoints, self._read_checkpoint) if resume else None
        self.start = checkpoint_number(self.start_from) if self.start_from else 0
        self.saved_at = self.start if self.start_from else -1  # what the newest checkpoint holds; -1 without one
        changes = self._changes() if self.start_from is not None else ""
        self.display = ProgressDisplay(total, self.start, rows=self._rows, unit=self._unit)
        if not resume:
            save_config(config, folder / "config.yaml")
        self.recorder = self._new_recorder(self.start if resume else None)
        self.display.keep = lambda text: self.recorder.log_message(self._position(), text)
        if resume and self.start_from is None:
            self.display.message(f"There is no checkpoint in {folder} to go on from: the run begins anew.")
        if changes:
            self.display.message(changes)
        self.display.recall(self.recorder.evaluations())
        self.stop = StopRequest()
        self.callbacks = load_callbacks(config.logging.callbacks)
        self.stopped_by = ""  # what a callback gave as the reason
        self.started = time.monotonic()
        self.train_seconds = self.startup_seconds = 0.0
        self.write_errors = 0

    def _changes(self) -> str:
        """As `changed_settings`."""
        return changed_settings(self.folder, self.config)

    def _new_recorder(self, resumed_iteration: int | None) -> RunRecorder:
        def draw(folder: Path) -> None:
            from rl_vlm.plots.run_curve import draw_curve

            draw_curve(folder)

        return RunRecorder(self.folder, self.config, resumed_iteration, draw)

    def execute(self) -> dict[str, Any]:
        """Run to the end and return the content of `result.json`. Raises InterruptedRun and RLVLMError."""
        kept = self.folder / "result.json"
        is_over = self._resumes and self.start >= self.total and kept.is_file()
        done: dict[str, Any] = json.loads(kept.read_text()) if is_over else {}
        if done.get("status") == "done":
            self.display.line(f"The run in {self.folder} is finished: to go on, add {self._length} above {self.total}.")
            self.recorder.close()
            return done
        with self.session():
            self._train()
        return self.result

    @contextmanager
    def session(self) -> Iterator[None]:
        """Inside, everything has started; at the end `result` is written. Raises InterruptedRun and RLVLMError."""
        status, error, rejected = "failed", "", False
        try:
            with self.display, self.stop.installed(self.display.message):
                try:
                    with self._services():
                        yield
                    status = "interrupted" if self.stop else "done"
                except KeyboardInterrupt:
                    self.stop.signal = self.stop.signal or signal.SIGINT
                    status = "interrupted"
                except Exception as failure:
                    error = str(failure) if isinstance(failure, RLVLMError) else f"{type(failure).__name__}: {failure}"
                    # A resume with a configuration that does not fit leaves the folder as it was.
                    rejected = self._resumes and self.stop.starting and isinstance(failure, UserInputError)
                    raise
                finally:
                    self.result = self._result(status) | self._outcome()
                    self.result["write_errors"] = self.write_errors + self.recorder.write_errors
                    if error:
                        self.result["error"] = error
                    if not rejected:
                        self.recorder.finish(self.result)
                        self._notify_callbacks("on_end", self.result)
        finally:
            self.recorder.close()
        if status == "interrupted":
            raise InterruptedRun(self.stop.signal or signal.SIGINT, self._what_now())

    def _notify_callbacks(self, event: str, *given: Any) -> None:
        """Call a method of all callbacks."""
        for callback in self.callbacks:
            try:
                getattr(callback, event)(self.folder, *given)
            except StopTraining as end:
                self.stopped_by = str(end) or type(callback).__name__
                self.display.message(f"Training ends here: {self.stopped_by}")

    @property
    def goes_on(self) -> bool:
        """Whether neither a signal nor a callback has ended the run."""
        return not self.stop and not self.stopped_by

    def _what_now(self) -> str:
        if self.saved_at < 0:
            return "no checkpoint was saved yet, --resume begins anew"
        if self.saved_at == self._position():
            return "the checkpoint was saved, --resume goes on"
        return f"the newest checkpoint is that of {self._unit} {self.saved_at}, --resume goes on from there"

    @abstractmethod
    def _position(self) -> int:
        """How far training is, in `_unit`s."""

    @abstractmethod
    def _write_checkpoint(self, folder: Path) -> None:
        """Write the files of a checkpoint. Raises OSError."""

    def _save(self, position: int) -> Path:
        """Save a checkpoint, and delete old ones. Raises OSError."""
        keep, name = self.config.logging.keep_checkpoints, self._checkpoint_name.format(position)
        return save_checkpoint(self.checkpoints, name, self._write_checkpoint, keep, self._history)

    def checkpoint(self) -> None:
        """Save a checkpoint. A full disk costs this checkpoint, not the run; the older ones stay."""
        position = self._position()
        if position != self.saved_at:
            with self._writing("a checkpoint"):
                self._save(position)
                self.saved_at = position
                self._notify_callbacks("on_checkpoint", position)

    def _save_trained(self, payload: WeightPayload, suffix: str = "") -> None:
        try:
            payload.write(self.folder / f"{payload.FOLDER}{suffix}")
        except OSError as error:
            raise RLVLMError(
                f"Could not write the adapter to {self.folder} ({error.strerror or error}): free some space and "
                "--resume."
            ) from error

    @contextmanager
    def _services(self) -> Iterator[None]:
        """Start everything, and stop it."""
        yield

    @abstractmethod
    def _train(self) -> None:
        """Train to the end, or while it `goes_on`."""

    @abstractmethod
    def _outcome(self) -> dict[str, Any]:
        """What `result.json` says of this kind of run."""

    def _started(self) -> None:
        """Everything has started: from here on a signal ends the run with a checkpoint."""
        save_config(self.config, self.folder / "config.yaml")
        self.startup_seconds = time.monotonic() - self.started
        self.stop.starting = False

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begun = time.monotonic()
        self.display.begins()
        try:
            yield
        finally:
            self.train_seconds += time.monotonic() - begun  # again after a learner that was lost

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.write_errors += 1
            self.display.message(f"Could not write {what} ({error.strerror or error}); going on without it.")

    def _before_and_after(self, name: str, key: str) -> dict[str, Any]:
        values = [entry[key] for entry in self.recorder.evaluations() if entry.get(key) is not None]
        return {f"{name}_before": values[0] if values else None, f"{name}_after": values[-1] if values else None}

    def _result(self, status: str) -> dict[str, Any]:
        rewards = self.recorder.column("reward/mean")
        window = max(1, min(5, len(rewards) // 2))  # rows of the beginning and of the end, of which none is both
        return {
            "status": status,
            **({"stopped_by": self.stopped_by} if self.stopped_by else {}),
            "iterations": self._position(),
            "train_seconds": round(self.train_seconds, 3),
            "startup_seconds": round(self.startup_seconds, 3),
            "reward_before": sum(rewards[:window]) / window if len(rewards) > 1 else None,
            "reward_after": sum(rewards[-window:]) / window if rewards else None,
        }
