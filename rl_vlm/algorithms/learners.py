"""Calls to an RLlib learner group whose learners may be dead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rl_vlm.types import RLVLMError

_TIMEOUT_S = 300.0


class LearnerLostError(RLVLMError):
    """No learner answered: it died. The next update finds that out too and replaces it."""


def on_one_learner(group: Any, function: Callable[[Any], Any]) -> Any:
    """`function(learner)` of the first learner that answers; all hold the same weights. Raises LearnerLostError."""
    if group.is_local:
        return function(group._learner)
    failed = None
    # A failed call is a result that holds an exception, which RLlib raises nowhere.
    for result in group.foreach_learner(function, timeout_seconds=_TIMEOUT_S):
        if result.ok:
            return result.get()
        failed = result.get()
    raise LearnerLostError(f"No learner answered: {failed or 'none is alive'}")


def on_every_learner(group: Any, function: Callable[[Any], Any]) -> None:
    """`function(learner)` on all of them. Raises LearnerLostError if one fails."""
    if group.is_local:
        function(group._learner)
        return
    for result in group.foreach_learner(function, timeout_seconds=_TIMEOUT_S):
        if not result.ok:
            raise LearnerLostError(f"A learner could not be restored: {result.get()}")
