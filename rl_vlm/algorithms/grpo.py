"""GRPO: sample groups from the served policy, subtract each group's mean reward, take clipped policy-gradient steps.

DeepSeekMath (arXiv 2402.03300) with DAPO's clip-higher (arXiv 2503.14476) and truncated importance sampling. One
iteration: env runners sample complete groups through Ray Serve; the learner group updates the LoRA weights; the new
adapter version goes to every replica. With `max_policy_lag` 0 these follow each other, otherwise sampling goes on while
the learner learns.

Advantage estimator, loss and aggregation are settings of their own (learning/estimators.py, learning/losses.py), so
Dr. GRPO, DAPO, RLOO and GSPO are this algorithm with other settings.
"""

from __future__ import annotations

from collections.abc import Sequence

from ray.rllib.algorithms.algorithm import Algorithm

from rl_vlm.algorithms.policy import PolicyAlgorithmConfig
from rl_vlm.algorithms.scored import ScoredAlgorithm
from rl_vlm.config import AlgorithmSection
from rl_vlm.learning.plan import plan_update
from rl_vlm.types import TrajectoryGroup


class GRPOConfig(PolicyAlgorithmConfig):
    """RLlib's configuration of GRPO."""

    def __init__(self, algo_class: type[Algorithm] | None = None) -> None:
        super().__init__(algo_class or GRPO, AlgorithmSection())


class GRPO(ScoredAlgorithm):
    """The training loop. One `train()` is one GRPO iteration."""

    config_class = GRPOConfig

    def learn_from(self, groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
        """Compute advantages, learn, publish."""
        run = self.run
        if run.algorithm.kl_in_reward:
            return self.learn_scored(groups)
        with self.timed("advantages"):
            plan = plan_update(
                groups,
                run.algorithm,
                self.rng,
                num_learners=max(run.learner.num_learners, 1),
                max_new_tokens=run.rollout.max_new_tokens,
            )
        figures = {"reward/zero_advantage_groups": plan.zero_advantage_groups / len(groups)}
        if self.iterations_left:
            self.rollouts.open_next()
        with self.timed("learn"):
            stats = self.learn(plan)
        self.remember_groups(groups, plan.advantages)
        return figures if stats is None else figures | stats.metrics()
