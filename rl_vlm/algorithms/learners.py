"""Learners: calls to an RLlib learner group whose learners may die, and their replacement."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import ray
import torch
from ray.exceptions import OutOfMemoryError as NodeOutOfMemoryError
from ray.exceptions import RayActorError, RayError
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.env.env_runner import EnvRunner
from ray.rllib.env.env_runner_group import EnvRunnerGroup
from ray.util.placement_group import get_current_placement_group

from rl_vlm.config.learner import LearnerActors
from rl_vlm.rollout.base_env_runner import RunEnvRunner, RunnerConfig
from rl_vlm.serving.registry import OWN
from rl_vlm.types import RLVLMError

# RLlib accepts them as env runners without the base class, whose import would cost each of their processes seconds.
EnvRunner.register(RunEnvRunner)


class RunnerGroup(EnvRunnerGroup):
    """Starts `RunEnvRunner`s: unpickling an AlgorithmConfig would import RLlib, torch and Tune in each of them. RLlib
    has no setting for the group's class."""

    def _make_worker(self, *, worker_index: int, **_: Any) -> Any:
        given = self._remote_config
        settings = RunnerConfig(
            run_config=given.run_config,
            run_id=getattr(given, "run_id", ""),
            model=getattr(given, "served_model", None),
            observation_space=given.observation_space,
            action_space=given.action_space,
            policy_key=getattr(given, "policy_key", OWN),
        )
        if worker_index == 0:  # in this process
            return self.env_runner_cls(config=settings, worker_index=0)
        bundle = -1 if get_current_placement_group() is None else self._pg_offset + worker_index
        runner = ray.remote(**self._remote_args)(self.env_runner_cls).options(
            placement_group_bundle_index=bundle,
            max_concurrency=self.env_runner_cls.concurrent_calls(given.run_config),
        )
        return runner.remote(config=settings, worker_index=worker_index)

    def sync_env_runner_states(self, **_: Any) -> None:
        """Does nothing: weights are in Serve or sent with each call, and env runners keep no other state of RLlib's."""


_TIMEOUT_S = 300.0
# For a sign of life beside a learner that failed; the others may wait for it in a collective, which NCCL does for ever.
_ALIVE_S = 30.0
_POLL_S = 1.0  # how often to look for answers while some are missing
_SLOWER, _LEAST_S = 10.0, 120.0  # an update may take ten times as long as the longest so far, and two minutes at least


class LearnerLostError(RLVLMError):
    """No learner answered, because it died. The next update replaces it.

    Do: nothing: the next update replaces it.
    """


class LearnerDiedError(RLVLMError):
    """A learner died and could not be replaced.

    Do: read the reason before it, often memory, and go on with `--resume`.
    """


class LearnerOutOfMemoryError(RLVLMError):
    """An update did not fit into a learner's memory; trying again would not help.

    Do: lower `learner.micro_batch_tokens`; `rl-vlm plan` shows what fits.
    """


class Learners:
    """The learners of a run: calls to them, and new ones in place of those that died.

    `rebuild` makes a new group, `restore` gives it the newest available state, and `restarts` counts deaths as
    "learner".
    """

    def __init__(
        self,
        group: Any,
        settings: LearnerActors,
        rebuild: Callable[[], Any],
        restore: Callable[[], None],
        restarts: Counter[str],
    ) -> None:
        self.group = group
        self._settings, self._rebuild, self._restore, self._restarts = settings, rebuild, restore, restarts
        self._longest: dict[type, float] = {}  # seconds, by the type of the batches
        self._replacements = 0  # by this process: a run that is resumed has all of `max_restarts` again

    def call(self, function: Callable[[Any], Any]) -> Any:
        """`function(learner)` of the first learner that answers; all hold the same weights. Where each holds a part of
        the model or of the optimiser's state, all are called, as they answer only together.

        Raises LearnerLostError, and what the function raises of RLVLMError.
        """
        group = self.group
        if group.is_local:
            return function(group._learner)
        learners = group._worker_manager.healthy_actor_ids()
        if self._settings.in_step:
            if len(learners) < group.config.num_learners:  # the others would wait for the dead one
                raise LearnerLostError("Not all learners are alive")

            def first_answers(learner: Any) -> Any:
                answer = function(learner)
                return answer if learner._learner_index == 0 else None  # large, and the same everywhere

            return _answers(group, first_answers, learners)[0]
        lost = LearnerLostError("No learner is alive")
        for learner in learners:  # one after the other: an answer may be large
            try:
                return _answers(group, function, [learner])[0]
            except LearnerLostError as error:
                lost = error
        raise lost

    def call_each(self, function: Callable[[Any], Any]) -> None:
        """`function(learner)` of each learner. Raises as `call` does."""
        if self.group.is_local:
            function(self.group._learner)
        else:
            _answers(self.group, function, self.group._worker_manager.healthy_actor_ids())

    def update(self, batches: Sequence[Any]) -> list[Any] | None:
        """Send one batch to each learner and return their results; None when learners died and were replaced. Raises
        LearnerOutOfMemoryError, LearnerDiedError, and whatever else a learner raises."""
        group = self.group
        try:
            if group.is_local:
                return [group._learner.update(training_data=TrainingData(episodes=[batch])) for batch in batches]
            started, kind = time.perf_counter(), type(batches[0])
            results = update_remote_learners(group, batches, self.timeout_s(kind))
            # An update of which no step had a gradient says nothing about others.
            if any(getattr(batches[0], "active", (True,))):
                self._longest[kind] = max(time.perf_counter() - started, self._longest.get(kind, 0.0))
            return results
        except LearnerLostError as error:
            self.replace(error)
            return None
        except (RayError, RuntimeError) as error:
            # Not Ray's own: a node's memory was full and Ray killed the process, so a retry may succeed.
            full = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
            if full and not isinstance(error, NodeOutOfMemoryError):
                raise LearnerOutOfMemoryError(
                    f"An update did not fit into a learner's memory ({str(error).splitlines()[0]}): lower "
                    "learner.micro_batch_tokens, or set learner.gradient_checkpointing."
                ) from error
            # A RuntimeError is either a collective that failed because another learner died, or a defect.
            died = isinstance(error, RayActorError)
            if group.is_local or (not died and all_learners_answer(group, len(batches))):
                raise
            self.replace(error)
            return None

    def timeout_s(self, kind: type) -> float:
        """How long learners may take for a type of batch: first `update_timeout_s`, then a multiple of the longest."""
        limit, longest = self._settings.update_timeout_s, self._longest.get(kind)
        return limit if longest is None else min(limit, max(_LEAST_S, _SLOWER * longest))

    def replace(self, error: Exception) -> None:
        """Start new learners and restore their state. Raises LearnerDiedError after `learner.max_restarts`."""
        self._longest.clear()  # new learners load and compile first
        while True:
            self._restarts["learner"] += 1
            self._replacements += 1
            if self._replacements > self._settings.max_restarts:
                raise LearnerDiedError(
                    f"A learner died {self._replacements} times, the last time with: {str(error).splitlines()[0]} "
                    "Raise learner.max_restarts, or give the learners more memory."
                ) from error
            if not self.group._is_shut_down:
                self.group.shutdown()
            try:
                self.group = self._rebuild()
                self._restore()
                return
            except (RayError, LearnerLostError) as again:  # the new ones were placed on a node that was dying too
                error = again


def update_remote_learners(group: Any, batches: Sequence[Any], timeout_s: float) -> list[Any]:
    """Send one batch to each remote learner and return their results in its order.

    RLlib's `LearnerGroup.update` waits for ever, and a learner whose node was cut off may never answer. Raises
    LearnerLostError if one is gone or silent, and at once what a learner raised: the others may wait for that one.
    """
    manager = group._worker_manager
    learners = manager.healthy_actor_ids()
    if len(learners) < len(batches):
        raise LearnerLostError(f"{len(batches) - len(learners)} of {len(batches)} learners are gone")
    arguments = [{"training_data": TrainingData(episodes_refs=[ray.put([batch])])} for batch in batches]
    tag = uuid.uuid4().hex  # answers to an earlier, abandoned update are not these
    answers: dict[int, Any] = {}
    manager.foreach_actor_async("update", tag, kwargs=arguments, remote_actor_ids=learners)
    deadline = time.monotonic() + timeout_s
    while len(answers) < len(batches) and (left := deadline - time.monotonic()) > 0:
        for result in manager.fetch_ready_async_reqs(tags=tag, timeout_seconds=min(_POLL_S, left)):
            answers[result.actor_id] = result
            if not result.ok:
                raise result.get()
    if len(answers) < len(batches):
        raise LearnerLostError(
            f"{len(batches) - len(answers)} of {len(batches)} learners did not answer an update within "
            f"{timeout_s:.0f} s (learner.update_timeout_s)"
        )
    return [answers[learner].get() for learner in learners]


def _answers(group: Any, function: Callable[[Any], Any], learners: Sequence[int]) -> list[Any]:
    """`function(learner)` of remote learners at the same time, in their order. Raises as `Learners.call` does."""

    def answer(learner: Any) -> Any:
        try:
            return function(learner), None
        except RLVLMError as error:  # returned, because RLlib takes an actor that raises for dead
            return None, error

    # RLlib returns other exceptions as results and does not raise them.
    results = list(group.foreach_learner(answer, remote_actor_ids=list(learners), timeout_seconds=_TIMEOUT_S))
    failed = next((result.get() for result in results if not result.ok), None)
    if failed is not None or len(results) < len(learners):
        raise LearnerLostError(f"Not all learners answered: {failed or 'one did not'}")
    answers = [result.get() for result in sorted(results, key=lambda result: result.actor_id)]
    for _, error in answers:
        if error is not None:
            raise error
    return [value for value, _ in answers]


def all_learners_answer(group: Any, count: int) -> bool:
    """Whether all `count` learners are alive; a collective that broke because a peer died leaves the others alive."""
    # RLlib takes one that raised an error for dead.
    results = list(group.foreach_learner(lambda _: True, healthy_only=False, timeout_seconds=_ALIVE_S))
    return sum(result.ok for result in results) == count
