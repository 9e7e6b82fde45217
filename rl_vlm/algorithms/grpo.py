"""GRPO: sample groups from the served policy, subtract each group's mean reward, take clipped policy-gradient steps.

DeepSeekMath (arXiv 2402.03300) with DAPO's clip-higher (arXiv 2503.14476) and truncated importance sampling. With
`max_policy_lag` 0 the steps of an iteration follow each other, otherwise sampling goes on while the learner learns.

Advantage estimator, loss and aggregation are settings of their own (learning/estimators.py, learning/losses.py), so
Dr. GRPO, DAPO, RLOO and GSPO are this algorithm with other settings.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rl_vlm.algorithms.policy import PolicyAlgorithm


class GRPO(PolicyAlgorithm):
    """The training loop. One `train()` is one GRPO iteration."""

    name: ClassVar[Literal["grpo", "distill"]] = "grpo"

    def iterate(self) -> None:
        """Sample groups, compare each answer with its group, learn from the differences, publish the new policy."""
        groups = self.sample()
        if not groups:
            return
        with self.replicas_at_rest():
            if self.run_config.algorithm.kl_in_reward:
                # The learners must compare policy and base model before there are rewards.
                minibatches = self.divide(groups)
                scores = self.score(minibatches)
                advantages = self.estimate(groups, scores)
            else:
                scores = None
                advantages = self.estimate(groups)
                minibatches = self.divide(groups, advantages)
            with self.timed("learn"):
                adapter = self.learn(minibatches, advantages, scored=scores is not None)
                self.publish(adapter)
            if scores is not None:
                self.adapt_kl(scores)
