"""Calls to an RLlib learner group whose learners may have died, and the meaning of their errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ray.exceptions import OutOfMemoryError as NodeOutOfMemoryError

from rl_vlm.types import RLVLMError

_TIMEOUT_S = 300.0


class LearnerLostError(RLVLMError):
    """No learner answered, because it died. The next update replaces it."""


class LearnerDiedError(RLVLMError):
    """A learner died and could not be replaced."""


class LearnerOutOfMemoryError(RLVLMError):
    """An update did not fit into a learner's memory; trying again would not help."""


def on_one_learner(group: Any, function: Callable[[Any], Any]) -> Any:
    """`function(learner)` of the first learner that answers; all hold the same weights. Raises LearnerLostError.

    Learners are asked one after the other: an answer may be large.
    """
    if group.is_local:
        return function(group._learner)
    failed = None
    for learner in group._worker_manager.healthy_actor_ids():
        # RLlib returns an exception as a result and does not raise it.
        for result in group.foreach_learner(function, remote_actor_ids=[learner], timeout_seconds=_TIMEOUT_S):
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


def all_learners_answer(group: Any, count: int) -> bool:
    """Whether all `count` learners are alive; a collective that broke because a peer died leaves the others alive."""
    results = list(group.foreach_learner(lambda _: True, timeout_seconds=_TIMEOUT_S))
    return sum(result.ok for result in results) == count


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch could not allocate: on a GPU its own class, on a CPU a RuntimeError that says so.

    Ray's OutOfMemoryError does not count: a node's memory was full and Ray killed the process, so a retry may succeed.
    """
    if isinstance(error, NodeOutOfMemoryError):
        return False
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
