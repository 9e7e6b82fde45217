"""Learners: calls to an RLlib learner group whose learners may die, and their replacement."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
import torch
from ray.exceptions import RayError, RayTaskError
from ray.rllib.core.learner.training_data import TrainingData

from rl_vlm.config.learner import LearnerActors
from rl_vlm.rollout.actors import ActorLostError, ActorPool
from rl_vlm.types import RLVLMError

_TIMEOUT_S = 300.0
# For a sign of life beside a learner that failed; the others may wait for it in a collective, which NCCL does for ever.
_ALIVE_S = 30.0
# What CUDA, cuBLAS and torch's allocator of main memory say where memory is short; none has a type of its own.
_FULL = ("CUDA error: out of memory", "_STATUS_ALLOC_FAILED", "can't allocate memory")
_SLOWER, _LEAST_S = 10.0, 120.0  # an update may take ten times as long as the longest so far, and two minutes at least


class LearnerLostError(RLVLMError):
    """A learner died or was silent for too long. The run replaces it.

    Do: nothing: the run goes on from its newest checkpoint.
    """


class LearnerDiedError(RLVLMError):
    """A learner died and could not be replaced.

    Do: read the reason before it, often memory, and go on with `--resume`.
    """


class LearnerOutOfMemoryError(RLVLMError):
    """Something did not fit into a learner's memory; trying again would not help.

    Do: lower `learner.micro_batch_tokens`; `rl-vlm plan` shows what fits.
    """


class Learners:
    """The learners of a run. `rebuild` makes a new group of them, and `restarts` counts deaths as "learner"."""

    def __init__(self, group: Any, settings: LearnerActors, rebuild: Callable[[], Any], restarts: Counter[str]) -> None:
        self._settings, self._rebuild, self._restarts = settings, rebuild, restarts
        self._longest: dict[type, float] = {}  # seconds, by the type of the batches
        self._replacements = 0  # by this process: a run that is resumed has all of `max_restarts` again
        self._take(group)

    def _take(self, group: Any) -> None:
        self.group = group
        self.actors = ActorPool({} if group.is_local else dict(enumerate(group._workers)))

    def call(self, function: Callable[[Any], Any]) -> Any:
        """`function(learner)` of the first learner that answers; all hold the same weights. Where each holds a part of
        the model or of the optimiser's state, all are called, as they answer only together.

        Raises LearnerLostError, LearnerOutOfMemoryError, and what the function raises.
        """
        with self._errors_of_learners():
            if self.group.is_local:
                return function(self.group._learner)
            if self._settings.in_step:

                def first_answers(learner: Any) -> Any:
                    answer = function(learner)
                    return answer if learner._learner_index == 0 else None  # large, and the same everywhere

                return self._apply(first_answers, self.actors.numbers)[0]
            lost = ActorLostError("No learner is alive")
            for number in self.actors.numbers:  # one after the other: an answer may be large
                try:
                    return self._apply(function, [number])[0]
                except ActorLostError as error:
                    lost = error  # its reason may be the memory of the node
            raise lost

    def call_each(self, function: Callable[[Any], Any]) -> None:
        """`function(learner)` of each learner. Raises as `call` does."""
        with self._errors_of_learners():
            if self.group.is_local:
                function(self.group._learner)
            else:
                self._apply(function, self.actors.numbers)

    def update(self, batches: Sequence[Any]) -> list[Any]:
        """Send one batch to each learner and return their results, in order. Raises as `call` does."""
        group, kind, started = self.group, type(batches[0]), time.perf_counter()
        with self._errors_of_learners():
            if group.is_local:
                return [group._learner.update(training_data=TrainingData(episodes=[batch])) for batch in batches]
            # Not RLlib's own call, which waits for ever: a learner whose node was cut off may never answer.
            shares = [TrainingData(episodes_refs=[ray.put([batch])]) for batch in batches]
            results = self.actors.begin(
                lambda number, learner: learner.update.remote(training_data=shares[number])
            ).results(self.timeout_s(kind))
        # An update of which no step had a gradient says nothing about others.
        if any(getattr(batches[0], "active", (True,))):
            self._longest[kind] = max(time.perf_counter() - started, self._longest.get(kind, 0.0))
        return results

    def _apply(
        self, function: Callable[[Any], Any], numbers: Sequence[int], timeout_s: float = _TIMEOUT_S
    ) -> list[Any]:
        return self.actors.begin(lambda _, learner: learner.apply.remote(function), numbers).results(timeout_s)

    @contextmanager
    def _errors_of_learners(self) -> Iterator[None]:
        """Raises what a learner raised. A full memory is LearnerOutOfMemoryError, a lost learner LearnerLostError."""
        try:
            yield
        except ActorLostError as error:
            raise LearnerLostError(f"A learner was lost: {str(error).rstrip('.')}.") from error
        except (RayTaskError, RuntimeError) as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            if isinstance(cause, RLVLMError):
                raise cause from error
            if isinstance(cause, torch.OutOfMemoryError) or any(text in str(cause) for text in _FULL):
                raise LearnerOutOfMemoryError(
                    f"This did not fit into a learner's memory ({str(cause).splitlines()[0]}): lower "
                    "learner.micro_batch_tokens, or set learner.checkpoint: all."
                ) from error
            # Either a collective that failed because another learner died, or a defect.
            if not self.group.is_local and not self._all_answer():
                raise LearnerLostError(f"A learner was lost: {str(cause).splitlines()[0]}") from error
            raise

    def _all_answer(self) -> bool:
        """Whether all learners are alive; a collective that broke because a peer died leaves the others alive."""
        try:
            self._apply(lambda _: None, self.actors.numbers, _ALIVE_S)
        except (ActorLostError, RayError):
            return False
        return True

    def timeout_s(self, kind: type) -> float:
        """How long learners may take for a type of batch: first `update_timeout_s`, then a multiple of the longest."""
        limit, longest = self._settings.update_timeout_s, self._longest.get(kind)
        return limit if longest is None else min(limit, max(_LEAST_S, _SLOWER * longest))

    def replace(self, error: Exception, restore: Callable[[], None]) -> None:
        """Start new learners; `restore` gives them a state. Raises LearnerDiedError after `learner.max_restarts`."""
        self._longest.clear()  # new learners load and compile first
        self.group.shutdown()
        while True:
            self._restarts["learner"] += 1
            self._replacements += 1
            if self._replacements > self._settings.max_restarts:
                raise LearnerDiedError(
                    f"A learner died {self._replacements} times, the last time with: {str(error).splitlines()[0]} "
                    "Raise learner.max_restarts, or give the learners more memory."
                ) from error
            try:
                self._take(self._rebuild())
            except RayError as again:  # they were placed on a node that was dying too
                error = again
                continue
            try:
                restore()
                return
            except (RayError, LearnerLostError) as again:
                error = again
                self.group.shutdown()
