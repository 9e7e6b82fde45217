"""The strategy that a configuration names."""

from __future__ import annotations

from rl_vlm.config import LearnerSection
from rl_vlm.learning.strategies.base import Strategy
from rl_vlm.learning.strategies.needs import check_strategy
from rl_vlm.learning.strategies.replicated import AllReduce, SingleProcess


def make_strategy(learner: LearnerSection) -> Strategy:
    """The strategy of a learner group; the larger ones are imported where they are used. Raises UserInputError."""
    check_strategy(learner)
    if learner.strategy == "fsdp2":
        from rl_vlm.learning.strategies.fsdp import FSDP2

        return FSDP2(learner.offload_params)
    if learner.zero_stage:
        from rl_vlm.learning.strategies.zero import Zero

        return Zero(learner.zero_stage, learner.offload_optimizer, learner.offload_params)
    name = learner.strategy or ("all_reduce" if learner.num_learners > 1 else "single")
    return AllReduce() if name == "all_reduce" else SingleProcess()
