"""Ends a run after so many seconds of training, by the variable TRAINING_SECONDS of its environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import rl_vlm


class TrainingSeconds(rl_vlm.Callback):
    """The start of the run and its evaluations do not count."""

    spent = 0.0

    def on_iteration(self, folder: Path, iteration: int, metrics: Mapping[str, float]) -> None:
        self.spent += metrics["time/step"]
        if self.spent >= float(os.environ["TRAINING_SECONDS"]):
            raise rl_vlm.StopTraining(f"{self.spent:.0f} seconds of training")
