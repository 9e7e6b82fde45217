"""What `serving.vllm.rest_while_learning` cannot be combined with."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_vlm.config.run import RunConfig


def check_rest(run: RunConfig) -> None:
    """Raise ValueError, one sentence that says what to change, for a run in which sampling and learning do not take turns on one GPU."""
    key = "serving.vllm.rest_while_learning"
    if not run.spec.publishes_adapters:
        raise ValueError(f"{key} has no effect with algorithm.name {run.algorithm.name}: remove it")
    if run.rollout.max_policy_lag:
        raise ValueError(
            f"{key} stops sampling while the learner works, and rollout.max_policy_lag {run.rollout.max_policy_lag} samples then: remove "
            "one of them"
        )
    if run.serving.shared:
        raise ValueError(
            f"{key} would stop the other runs of serving.shared: remove it, or give the run its own replicas"
        )
    if not run.serving.gpus_per_replica:
        return  # the same turns, to try them out; a CPU's memory stays where it is
    shares = (run.serving.gpus_per_replica, run.learner.gpus_per_learner)
    one_pair = run.serving.num_replicas == 1 and run.serving.autoscaling is None and run.learner.num_learners <= 1
    if not (one_pair and all(0 < share < 1 for share in shares) and sum(shares) <= 1):
        raise ValueError(
            f"{key} is for one replica and one learner on one GPU: set serving.gpus_per_replica and learner.gpus_per_learner to 0.5 "
            "and serving.num_replicas to 1, or remove it"
        )
