"""GRPO: sample groups from the served policy, subtract each group's mean reward, take clipped policy-gradient steps.

DeepSeekMath (arXiv 2402.03300) with DAPO's clip-higher (arXiv 2503.14476) and truncated importance sampling. One
iteration: env runners sample complete groups through Ray Serve; the learner group updates the LoRA weights; the new
adapter version goes to every replica. With `max_policy_lag` 0 these follow each other, otherwise sampling goes on while
the learner learns.

Advantage estimator, loss and aggregation are settings of their own (learning/estimators.py, learning/losses.py), so
Dr. GRPO, DAPO, RLOO and GSPO are this algorithm with other settings.
"""

from __future__ import annotations

from ray.rllib.algorithms.algorithm import Algorithm

from rl_vlm.algorithms.policy import PolicyAlgorithm, PolicyAlgorithmConfig
from rl_vlm.learning.plan import plan_update
from rl_vlm.rollout.rollouts import sampling_figures


class GRPOConfig(PolicyAlgorithmConfig):
    """RLlib's configuration of GRPO."""

    def __init__(self, algo_class: type[Algorithm] | None = None) -> None:
        super().__init__(algo_class or GRPO)


class GRPO(PolicyAlgorithm):
    """The training loop. One `train()` is one GRPO iteration."""

    config_class = GRPOConfig

    def iterate(self) -> dict[str, float]:
        """Sample, compute advantages, learn, publish."""
        run = self.run
        with self.timed("sample"):
            groups = self.rollouts.next_groups(self.version, self.iterations_left)
        figures = sampling_figures(groups, self.version, self._clock["sample"], run.rollout.max_turns)
        if groups:
            with self.timed("advantages"):
                plan = plan_update(
                    groups,
                    run.algorithm,
                    self.rng,
                    num_learners=max(run.learner.num_learners, 1),
                    max_new_tokens=run.rollout.max_new_tokens,
                )
            figures["reward/zero_advantage_groups"] = plan.zero_advantage_groups / len(groups)
            if self.iterations_left:
                self.rollouts.open_next()
            with self.timed("learn"):
                stats = self.learn(plan)
            if stats is not None:
                figures |= stats.metrics()
            self.remember_groups(groups, plan)
        return {**figures, **self.counts()}
