"""Plans an update: the advantages of trajectory groups, and each learner's share of each optimiser step.

No Ray, no torch.

The order is: `divide` the groups and let the learners score them where an estimator needs that; `make_experience` of
the groups and the scores; `estimate_advantages`; `update_batches` for the learners. Where no scores are needed the
groups are divided after the estimate, so that samples without an advantage are left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rl_vlm.config.learner import AlgorithmSection
from rl_vlm.learning.batching import Minibatch
from rl_vlm.learning.estimators import ESTIMATORS, Estimate, Experience, PerToken, Rescaling, ReturnScale
from rl_vlm.models.weights import WeightPayload
from rl_vlm.tracing import Span
from rl_vlm.types import TrajectoryGroup

Metrics = dict[str, float]
# The fields of UpdateStats that a micro-batch adds to, beside those of a KL penalty and a critic.
TOKEN_SUMS = ("loss", "clipped", "entropy", "approx_kl", "mismatch_kl", "mismatch_prob", "logprob", "masked")


@dataclass(slots=True)
class UpdateStats:
    """Sums over sampled tokens, so that they can be added across micro-batches and learners."""

    tokens: float = 0.0
    loss: float = 0.0
    clipped: float = 0.0
    entropy: float = 0.0  # NaN where it is not measured
    logprob: float = 0.0
    value_loss: float = 0.0
    kl: float = 0.0
    approx_kl: float = 0.0
    mismatch_kl: float = 0.0
    mismatch_prob: float = 0.0
    masked: float = 0.0  # tokens that a mask of algorithm.mismatch left out
    ratio_max: float = 0.0
    grad_norm: float = 0.0
    steps: int = 0
    skipped_steps: int = 0  # the gradient was not finite
    lr: float = 0.0
    first_ratio_error: float = 0.0  # largest |ratio - 1| on the first minibatch, where it was probed: must be exactly 0

    @classmethod
    def merge(cls, parts: Sequence[UpdateStats]) -> UpdateStats:
        """The statistics of all learners together, which make the same steps."""
        merged = replace(parts[0])
        for name in (*TOKEN_SUMS, "tokens", "value_loss", "kl"):
            setattr(merged, name, sum(getattr(part, name) for part in parts))
        for name in ("ratio_max", "first_ratio_error"):
            setattr(merged, name, max(getattr(part, name) for part in parts))
        return merged

    def metrics(self) -> Metrics:
        """Averages under the names that are logged."""
        tokens = max(self.tokens, 1.0)
        steps = max(self.steps, 1)
        return {
            "policy/loss": self.loss / steps,
            "policy/kl": self.kl / tokens,
            "policy/approx_kl": self.approx_kl / tokens,
            "policy/entropy": self.entropy / tokens,
            "policy/token_logprob_mean": self.logprob / tokens,
            "policy/clip_fraction": self.clipped / tokens,
            "policy/ratio_max": self.ratio_max,
            "policy/grad_norm": self.grad_norm / steps,
            "policy/lr": self.lr,
            "policy/optimizer_steps": float(self.steps),
            "policy/skipped_steps": float(self.skipped_steps),
            "policy/first_ratio_error": self.first_ratio_error,
            "mismatch/kl": self.mismatch_kl / tokens,
            "mismatch/token_mult_prob_error": self.mismatch_prob / tokens if self.tokens else 1.0,
            "mismatch/masked": self.masked / tokens,
        }


@dataclass(slots=True)
class ScoreBatch:
    """One learner's minibatches, to be answered with `Scores`.

    An object of its own, because RLlib takes lists apart.
    """

    minibatches: list[Minibatch]


@dataclass(slots=True)
class Scores:
    """What the learners know before an update, by trajectory id and sampled token: float32 [T].

    log_ratio: log-probability minus that of the base model, where a KL penalty needs it. values: the critic's,
    normalised.
    """

    log_ratio: dict[str, np.ndarray] = field(default_factory=dict)
    values: dict[str, np.ndarray] = field(default_factory=dict)

    @classmethod
    def merge(cls, parts: Sequence[Scores]) -> Scores:
        """The scores of all learners together."""
        merged = cls()
        for part in parts:
            merged.log_ratio |= part.log_ratio
            merged.values |= part.values
        return merged


@dataclass(slots=True)
class UpdateBatch:
    """One learner's share of one update: its part of every optimiser step, and what all learners agree on.

    `minibatches` is empty where those are meant that the learner has scored last. advantages, returns: float32 [T] by
    trajectory id; returns are normalised, and empty without a critic. value_weights: of each step, of the loss of a
    token that has a return.
    """

    minibatches: list[Minibatch]
    active: list[bool]  # by step: whether any learner has samples
    advantages: dict[str, np.ndarray]
    returns: dict[str, np.ndarray]
    value_weights: list[float]
    rescaling: Rescaling | None = None  # of the critic's normalisation
    epochs: int = 1
    learn_policy: bool = True
    lr_factor: float = 1.0  # of the schedule
    version: int = 1  # of the adapter that the update makes
    trace: str = ""  # the span that the update belongs to


@dataclass(slots=True)
class UpdateResult:
    """What a learner answers to an UpdateBatch. Learner 0 adds the new adapter."""

    stats: UpdateStats
    adapter: WeightPayload | None = None
    spans: list[Span] = field(default_factory=list)  # of an update that is traced


def estimate_advantages(experience: Experience, settings: AlgorithmSection) -> Estimate:
    """What the configured estimator makes of the groups, checked. Raises EstimatorError."""
    estimate = ESTIMATORS.get(settings.estimator)(experience, settings)
    means, learns = estimate.summary(_sampled_lengths(experience.groups), settings.estimator)
    return replace(estimate, means=means, learns=learns)


def divide(
    groups: Sequence[TrajectoryGroup],
    settings: AlgorithmSection,
    rng: np.random.Generator,
    estimate: Estimate | None = None,
    *,
    num_learners: int = 1,
    max_new_tokens: int = 1,
) -> list[list[Minibatch]]:
    """Divide groups into the steps of an epoch and these among learners: `[learner][step]`.

    `max_new_tokens` is aggregation "constant"'s.

    Every step's weights are normalised over the whole step, all learners and skipped samples included, so neither the
    number of learners nor the skipping changes the gradient. Samples with zero advantage are skipped unless a KL
    penalty or an entropy bonus gives them a gradient. Without `estimate` no advantage is known yet, and none is
    skipped.
    """
    lengths = _sampled_lengths(groups)
    order = rng.permutation(len(groups))
    minibatches: list[list[Minibatch]] = [[] for _ in range(num_learners)]
    skips = estimate is not None and not settings.learns_without_advantage
    for members in np.array_split(order, min(settings.minibatches, max(len(groups), 1))):
        weight = _weights([length for k in members for length in lengths[k]], settings.aggregation, max_new_tokens)
        step = [Minibatch([], {}) for _ in range(num_learners)]
        load = [0] * num_learners
        kept = {
            k: [
                one
                for n, one in enumerate(groups[k].trajectories)
                if lengths[k][n] and (not skips or (estimate is not None and estimate.learns[k][n]))
            ]
            for k in members
        }
        # Longest first onto the least loaded learner keeps the learners' work even.
        for k in sorted(members, key=lambda k: -sum(map(len, kept[k]))):
            if kept[k]:
                learner = load.index(min(load))
                step[learner].groups.append(kept[k])
                step[learner].weights |= {one.trajectory_id: weight(one.num_sampled) for one in kept[k]}
                load[learner] += sum(map(len, kept[k]))
        for learner, minibatch in enumerate(step):
            minibatches[learner].append(minibatch)
    return minibatches


def update_batches(
    minibatches: Sequence[Sequence[Minibatch]],
    groups: Sequence[TrajectoryGroup],
    estimate: Estimate,
    scale: ReturnScale | None = None,
    *,
    scored: bool = False,
    **how: Any,
) -> list[UpdateBatch]:
    """Each learner's share of an update from `divide`'s minibatches; returns are normalised by `scale`.

    `scored`: the learners have packed the minibatches already, so these are not sent again. `how`: fields of
    UpdateBatch that are equal for all learners.
    """
    advantages, returns = {}, {}
    for g, group in enumerate(groups):
        for k, trajectory in enumerate(group.trajectories):
            advantages[trajectory.trajectory_id] = estimate.advantages[g][k]
            if estimate.returns is not None and scale is not None:
                raw = estimate.returns[g][k]
                returns[trajectory.trajectory_id] = ((raw - scale.mean) / scale.std).astype(np.float32)
    steps = list(zip(*minibatches, strict=True))
    active = [any(part.groups for part in step) for step in steps]
    value_weights = [
        1.0 / max(sum(int(np.isfinite(returns[name]).sum()) for part in step for name in part.weights if returns), 1)
        for step in steps
    ]
    shares = []
    for own in minibatches:
        names = [name for step in own for name in step.weights]
        shares.append(
            UpdateBatch(
                [] if scored else list(own),
                active,
                {name: advantages[name] for name in names},
                {name: returns[name] for name in names} if returns else {},
                value_weights,
                **how,
            )
        )
    return shares


def _sampled_lengths(groups: Sequence[TrajectoryGroup]) -> list[list[int]]:
    """The numbers of sampled tokens per group and trajectory."""
    return [[trajectory.num_sampled for trajectory in group.trajectories] for group in groups]


def _weights(lengths: Sequence[int], aggregation: str, max_new_tokens: int) -> Callable[[int], float]:
    """The weight of each token loss of a trajectory, given the sampled tokens of all trajectories of the step, and its
    own."""
    sequences, tokens = len(lengths), sum(lengths)
    if aggregation == "sequence_mean":
        return lambda length: 1.0 / (length * sequences)
    if aggregation == "token_mean":
        return lambda length: 1.0 / tokens
    return lambda length: 1.0 / (max_new_tokens * sequences)


def make_experience(
    groups: Sequence[TrajectoryGroup],
    settings: AlgorithmSection,
    rng: np.random.Generator,
    scores: Scores | None = None,
    *,
    max_new_tokens: int = 1,
    kl_coef: float = 0.0,
    scale: ReturnScale | None = None,
) -> Experience:
    """What an estimator sees of the groups. `overlong_buffer` takes its penalty from a trajectory's last turn.

    With `shuffle_rewards`, a control with which nothing can be learned, the same total rewards are given to other
    trajectories, at their last turns. From the learners' `scores` come the values, as returns by `scale`, and the
    penalty -kl_coef (old - reference) of each token.
    """
    turn_rewards = [
        [np.array([turn.reward for turn in trajectory.turns]) for trajectory in group.trajectories] for group in groups
    ]
    if settings.overlong_buffer:
        for group, rewards in zip(groups, turn_rewards, strict=True):
            for trajectory, turns in zip(group.trajectories, rewards, strict=True):
                turns[-1:] += overlong_penalty(trajectory.num_sampled, max_new_tokens, settings.overlong_buffer)
    if settings.shuffle_rewards:
        trajectories = [turns for rewards in turn_rewards for turns in rewards]
        for turns, total in zip(trajectories, rng.permutation([turns.sum() for turns in trajectories]), strict=True):
            turns[:] = 0
            turns[-1:] = total
    penalties = values = None
    if scores is not None and settings.kl_in_reward:
        penalties = _per_token(groups, scores.log_ratio, lambda tokens: -kl_coef * tokens)
    if scores is not None and scale is not None and scores.values:
        values = _per_token(groups, scores.values, lambda tokens: tokens * scale.std + scale.mean)
    return Experience(groups, turn_rewards, penalties, values)


def _per_token(
    groups: Sequence[TrajectoryGroup], arrays: Mapping[str, np.ndarray], change: Callable[[np.ndarray], np.ndarray]
) -> PerToken:
    """Arrays by trajectory id in the order of the groups; a trajectory without a sampled token has none."""
    nothing = np.zeros(0, dtype=np.float32)
    return [
        [change(arrays.get(trajectory.trajectory_id, nothing)) for trajectory in group.trajectories] for group in groups
    ]


def overlong_penalty(length: int, max_new_tokens: int, buffer: int) -> float:
    """What DAPO adds to the reward of a trajectory of `length` sampled tokens (arXiv 2503.14476, equation 13).

    0 up to max_new_tokens - buffer, then linearly down to -1 at max_new_tokens.
    """
    return float(np.clip((max_new_tokens - buffer - length) / buffer, -1.0, 0.0))
