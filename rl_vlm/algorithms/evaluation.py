"""Evaluates the policy during training, on the replicas that sample for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rl_vlm.evaluation.heldout import evaluation_tasks, viewed_tasks
from rl_vlm.evaluation.outcomes import outcomes_of_groups, summarize
from rl_vlm.models.weights import WeightPayload
from rl_vlm.rollout.tasks import RolloutTask
from rl_vlm.types import RLVLMError, TrajectoryGroup

if TYPE_CHECKING:
    from rl_vlm.algorithms.policy import PolicyAlgorithm


# Greedy episodes of held-out items, with their conversations.
Items = list[tuple[RolloutTask, TrajectoryGroup]]


def evaluate(algorithm: PolicyAlgorithm, keep: int = 0) -> tuple[dict[str, Any], Items]:
    """Accuracy on the held-out split, per variant and environment (see `summarize`), and the first `keep` items."""
    run_config, started = algorithm.run_config, time.perf_counter()
    with evaluated_weights(algorithm):
        tasks = evaluation_tasks(run_config, algorithm.test_sizes, algorithm.version)
        repeated = run_config.sight.blank_items
        if algorithm.sight.needed and repeated:
            tasks += viewed_tasks(tasks, "blank", repeated) + viewed_tasks(tasks, "swapped", repeated)
        tasks = [replace(task, record=task.index < keep and task.temperature == 0) for task in tasks]
        groups, result = algorithm.rollouts.evaluate(tasks, run_config.evaluation.timeout_s)
    algorithm.count_env_runners()
    of_tasks = {task.group_id: task for task in tasks if task.record}
    kept = [(of_tasks[group.group_id], group) for group in groups if group.group_id in of_tasks]
    results = {
        **summarize(run_config, tasks, outcomes_of_groups(run_config, tasks, groups), algorithm.env_metrics),
        "lost": len(result.lost),
        "policy_version": algorithm.version,
        "seconds": time.perf_counter() - started,
    }
    return results, kept


def sample_items(algorithm: PolicyAlgorithm, count: int, greedy: bool) -> list[TrajectoryGroup]:
    """An episode with its messages of each of the first held-out items, by the policy as it is."""
    config, evaluation = algorithm.run_config, algorithm.run_config.evaluation
    first = next(iter(evaluation.variants.items()))
    asked = evaluation.model_copy(update={"num_items": count, "samples": 1, "variants": dict([first])})
    tasks = evaluation_tasks(config.model_copy(update={"evaluation": asked}), algorithm.test_sizes, algorithm.version)
    temperature = 0.0 if greedy else config.rollout.temperature
    shown = [replace(task, group_id=f"shown/{task.group_id}", record=True, temperature=temperature) for task in tasks]
    return algorithm.rollouts.evaluate(shown, evaluation.timeout_s)[0]


@contextmanager
def evaluated_weights(algorithm: PolicyAlgorithm) -> Iterator[None]:
    """Inside, the replicas hold what `evaluation.weights` names; each exchange takes a version."""
    version = algorithm.version
    if algorithm.run_config.evaluation.weights == "policy":
        yield
        return

    def give_back() -> None:
        trained = algorithm.learners.call(lambda learner: learner.policy.payload(version))
        algorithm.publish_restored(trained)

    algorithm.publish_restored(averaged_adapter(algorithm))
    try:
        yield
    except Exception as error:  # raised again, with what went wrong after it
        try:
            give_back()
        except RLVLMError as second:  # such as a learner that is lost, which must not hide the first error
            error.add_note(str(second))
        raise
    give_back()  # an interruption does not wait for it


def averaged_adapter(algorithm: PolicyAlgorithm) -> WeightPayload:
    """The average of the weights under `learner.ema_decay`. Raises LearnerLostError."""
    version = algorithm.version
    return algorithm.learners.call(lambda learner: learner.averaged_adapter(version))  # type: ignore[no-any-return]
