"""What a strategy needs of the installation; without torch, for the checks before a run."""

from __future__ import annotations

import importlib.util

from rl_vlm.config import LearnerSection
from rl_vlm.types import UserInputError


def check_strategy(learner: LearnerSection) -> None:
    """Raise UserInputError when the package that a strategy needs is not installed."""
    if learner.zero_stage and importlib.util.find_spec("deepspeed") is None:
        raise UserInputError(
            f"learner.strategy {learner.strategy} needs the package deepspeed: pip install 'rl-vlm[deepspeed]'."
        )
