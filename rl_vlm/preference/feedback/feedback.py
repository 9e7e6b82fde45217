"""Feedback (PEBBLE's labelling sessions): what both kinds share. Pairs are in pairs.py, scores in scores.py. No Ray here."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_vlm.config import PreferenceSection
from rl_vlm.labelling.session_files import SessionFiles
from rl_vlm.labelling.types import HasState, KnowsMargin
from rl_vlm.preference.feedback.patience import PatientSessions
from rl_vlm.preference.replay.buffer import ReplayBuffer
from rl_vlm.preference.reward_model.ensemble import RewardEnsemble
from rl_vlm.preference.reward_model.examples import Examples
from rl_vlm.preference.reward_model.training import FitReport, RewardTrainer
from rl_vlm.types import UserInputError


@dataclass(slots=True)
class SessionReport:
    """What one session gave."""

    asked: int = 0
    usable: int = 0  # pairs (or scores) that the reward model is trained on
    undecided: int = 0
    errors: int = 0
    right: float = float("nan")  # share of the decided labels that agree with the true rewards
    seconds: float = 0.0
    fit_seconds: float = 0.0
    fit: FitReport | None = None

    def metrics(self) -> dict[str, float]:
        """As metrics of a run."""
        metrics = {
            "labels/asked": float(self.asked),
            "labels/usable": float(self.usable),
            "labels/undecided": float(self.undecided),
            "labels/errors": float(self.errors),
            "labels/seconds": self.seconds,
            "time/fit": self.fit_seconds,
        }
        if np.isfinite(self.right):
            metrics["labels/accuracy"] = self.right
        if self.fit is not None and self.fit.examples:
            metrics |= {
                "reward_model/examples": float(self.fit.examples),
                "reward_model/gradient_steps": float(self.fit.gradient_steps),
                "reward_model/loss": self.fit.loss,
            }
            if np.isfinite(self.fit.accuracy):
                metrics["reward_model/accuracy"] = self.fit.accuracy
        return metrics


class Feedback(ABC):
    """Asks about segments of the replay buffer, keeps the answers, and trains the reward model on them.

    Args:
        settings: `preference` of the configuration.
        trainer: trains the reward ensemble.
        labeller: answers; None where only a label cache is replayed.
        store: keeps the answers of all sessions.
        segments_per_example: 2 for pairs, 1 for scores.
    """

    def __init__(
        self,
        settings: PreferenceSection,
        trainer: RewardTrainer,
        labeller: object | None,
        store: SessionFiles,
        segments_per_example: int,
    ) -> None:
        self.settings, self.trainer, self.store = settings, trainer, store
        self.asked = 0  # what is held against max_feedback: questions without an answer are left out
        self.usable = self.sessions = 0
        self.stop_requested: Callable[[], bool] = lambda: False
        self.examples = Examples(segments_per_example, settings.max_feedback)
        self._labeller = labeller
        self._patient = PatientSessions(labeller, settings.labeller_patience_s)

    @property
    def model(self) -> RewardEnsemble:
        """The reward model."""
        return self.trainer.ensemble

    @property
    def exhausted(self) -> bool:
        """Whether no further answers can be had."""
        return self._labeller is None

    @property
    def cost(self) -> str:
        """What labelling has cost so far and how the labeller behaves, in one line; empty for labellers that count nothing."""
        stats = getattr(self._labeller, "stats", None)
        return stats.summary() if stats is not None else ""

    def session(
        self, replay: ReplayBuffer, count: int, step: int, rng: np.random.Generator, mean_return: float, horizon: int
    ) -> SessionReport | None:
        """Ask `count` questions and train the reward model on all answers that are known.

        While the labeller is down, the session is tried again; nothing of a failed attempt is kept. Returns None if the user
        wants to stop, or if no further answers can be had. Raises LabellerDownError after `labeller_patience_s`.
        """
        if isinstance(self._labeller, KnowsMargin):
            self._labeller.set_margin(mean_return, self.settings.segment_length, horizon)
        started = time.monotonic()
        report = self._ask(replay, count, step, rng, horizon)
        if report is None:
            return None
        report.seconds = time.monotonic() - started
        self.sessions += 1
        self.asked += report.asked - report.errors
        self.usable += report.usable
        started = time.monotonic()
        report.fit = self.trainer.fit(self.examples)
        report.fit_seconds = time.monotonic() - started
        return report

    @abstractmethod
    def _ask(
        self, replay: ReplayBuffer, count: int, step: int, rng: np.random.Generator, horizon: int
    ) -> SessionReport | None:
        """One session: ask, store the answers and add them to the examples."""

    @abstractmethod
    def _restore_examples(self) -> None:
        """Add the answers in the store to the examples."""

    def _rewind(self) -> None:
        """Move sessions aside that this run does not know: of an attempt that ended before its first checkpoint, or later ones."""
        self.store.rewind(self.sessions)

    def state(self) -> dict[str, Any]:
        """The state that neither the label store nor the reward model's file holds, as JSON."""
        labeller = self._labeller
        return {
            "asked": self.asked,
            "usable": self.usable,
            "sessions": self.sessions,
            "labeller": labeller.state() if isinstance(labeller, HasState) else None,
        }

    def load(self, state: Mapping[str, Any], model_file: Path) -> None:
        """Go on from a saved state; the label store must hold its sessions, later ones are moved aside.

        Raises UserInputError for the state of another labeller, or of a run without one.
        """
        try:
            self.asked, self.usable = int(state["asked"]), int(state["usable"])
            self.sessions = int(state["sessions"])
            if isinstance(self._labeller, HasState) and state["labeller"] is not None:
                self._labeller.set_state(state["labeller"])
        except (KeyError, TypeError) as error:
            raise UserInputError(
                "The checkpoint is of a run with another labeller: keep preference.reward, and of preference.labels source and "
                "coin_flips."
            ) from error
        self._rewind()
        self.trainer.load(model_file)
        self.examples.clear()
        self._restore_examples()

    def close(self) -> None:
        """End the event loop of the sessions."""
        self._patient.close()
