"""PPO: clipped policy-gradient steps on advantages that a critic estimates.

Schulman et al., arXiv 1707.06347, with generalised advantage estimation (arXiv 1506.02438) over tokens, turns, or
tokens inside turns (learning/estimators.py).

The critic (learning/critic.py) is a linear head on the policy's last hidden state, or has a LoRA adapter of its
own on the same frozen model. Returns are normalised (PopArt). In the first `critic.warmup_iterations` the policy stays
as it is.
"""

from __future__ import annotations

from rl_vlm.algorithms.policy import PolicyAlgorithm


class PPO(PolicyAlgorithm):
    """The training loop. One `train()` is one PPO iteration."""

    name = "ppo"

    def iterate(self) -> None:
        """Sample episodes, value their states, estimate advantages, learn policy and critic, publish the new policy."""
        groups = self.sample()
        if not groups:
            return
        assert self.run_config.critic is not None
        learn_policy = self.updates >= self.run_config.critic.warmup_iterations
        with self.replicas_at_rest():
            minibatches = self.divide(groups)
            scores = self.score(minibatches)
            advantages = self.estimate(groups, scores)
            with self.timed("learn"):
                adapter = self.learn(minibatches, advantages, scored=True, learn_policy=learn_policy)
                self.publish(adapter)
            if self.run_config.algorithm.kl_in_reward:
                self.adapt_kl(scores, learn_policy)
