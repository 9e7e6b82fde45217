"""Updates in two steps: the learners score what was sampled, an estimator assigns credit, the learners learn.

Needed where advantages depend on the learners: a critic's values, or a KL penalty in the reward. The learners keep what
they have packed between the two calls, so trajectories are sent and packed once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from rl_vlm.algorithms.policy import PolicyAlgorithm
from rl_vlm.config.algorithm import AlgorithmSection
from rl_vlm.learning.estimators import flat
from rl_vlm.learning.learner import ScoreBatch
from rl_vlm.learning.plan import Shards, assign_credit, distribute, make_experience, targets_of
from rl_vlm.learning.returns import ReturnScale, explained_variance
from rl_vlm.learning.scores import Scores
from rl_vlm.statistics import mean_kl
from rl_vlm.types import TrajectoryGroup


class ScoredAlgorithm(PolicyAlgorithm):
    """A policy algorithm whose advantages may need scores. Its state beside the learners': KL coefficient, return scale."""

    def reset(self) -> None:
        """See PolicyAlgorithm."""
        super().reset()
        settings = self.run.algorithm
        # An adapted coefficient that began at 0 would stay there.
        self.kl_coef = max(settings.kl_coef, settings.kl_min) if settings.kl_target else settings.kl_coef
        self.return_scale = ReturnScale()

    def state(self) -> dict[str, Any]:
        """See PolicyAlgorithm."""
        return {**super().state(), "kl_coef": self.kl_coef, "return_scale": asdict(self.return_scale)}

    def set_state(self, state: dict[str, Any]) -> None:
        """See PolicyAlgorithm."""
        super().set_state(state)
        if self.run.algorithm.kl_target:  # a fixed one is the configuration's, which a resume may have changed
            self.kl_coef = float(state["kl_coef"])
        self.return_scale = ReturnScale(**state["return_scale"])

    def learn_scored(self, groups: Sequence[TrajectoryGroup], *, learn_policy: bool = True) -> dict[str, float]:
        """One update from complete groups; with `learn_policy` False, of the critic alone. Returns its figures."""
        run = self.run
        settings = run.algorithm
        shards = distribute(
            groups,
            settings,
            self.rng,
            num_learners=max(run.learner.num_learners, 1),
            max_new_tokens=run.rollout.max_new_tokens,
        )
        with self.timed("score"):
            answers = self.update_learners([ScoreBatch(minibatches) for minibatches in shards.minibatches])
        if answers is None:
            return {}
        with self.timed("advantages"):
            scores, scale = Scores.merge(answers), self.return_scale
            experience = make_experience(
                groups,
                settings,
                self.rng,
                scores,
                max_new_tokens=run.rollout.max_new_tokens,
                kl_coef=self.kl_coef,
                scale=scale,
            )
            credit = assign_credit(experience, settings)
            figures = {"reward/zero_advantage_groups": credit.zero_advantage_groups / len(groups)}
            if credit.estimate.returns is not None and experience.values is not None:
                returns, values = flat(credit.estimate.returns), flat(experience.values)
                figures["value/return"] = float(np.nanmean(returns)) if np.isfinite(returns).any() else 0.0
                figures["value/explained_variance"] = explained_variance(values, returns)
                if run.critic is not None and run.critic.normalize_returns:
                    self.return_scale = scale.observe(returns)
            targets = targets_of(experience, credit, shards, self.return_scale)
        if self.iterations_left:
            self.rollouts.open_next()
        with self.timed("learn"):
            stats = self.learn(
                Shards([[] for _ in targets], shards.active),
                targets=targets,
                rescaling=scale.rescaling_to(self.return_scale),
                learn_policy=learn_policy,
            )
        self.remember_groups(groups, credit.means)
        if stats is None:
            return figures
        figures |= stats.metrics()
        if scores.values:
            figures["value/loss"] = stats.value_loss / max(stats.steps, 1)
        if settings.kl_in_reward:
            # KL(policy || reference), from log policy - log reference.
            kl = mean_kl(-np.concatenate(list(scores.log_ratio.values()) or [np.zeros(1)]))
            figures |= {"policy/kl": kl, "policy/kl_coef": self.kl_coef}
            if (
                learn_policy
            ):  # while the critic learns alone the policy is the reference, which says nothing about the coefficient
                self.kl_coef = adapted_kl_coef(self.kl_coef, kl, settings)
        return figures


def adapted_kl_coef(coefficient: float, kl: float, settings: AlgorithmSection) -> float:
    """The KL coefficient after an iteration with that KL per token: larger above twice the target, smaller below half of it."""
    if settings.kl_target is None:
        return coefficient
    if kl > 2 * settings.kl_target:
        coefficient *= settings.kl_rate
    elif kl < settings.kl_target / 2:
        coefficient /= settings.kl_rate
    return min(max(coefficient, settings.kl_min), settings.kl_max)
