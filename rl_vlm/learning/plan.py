"""Plans an update: the advantages of trajectory groups, and each learner's share of each optimiser step.

`divide` the groups and let the learners score them where an estimator needs that; `make_experience` of both;
`estimate_advantages`; `update_batches` for the learners. Where no scores are needed the groups are divided after the
estimate, so that samples without an advantage are left out. No Ray, no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl_vlm.config import AlgorithmSection, PolicyConfig
from rl_vlm.learning.batching import Minibatch
from rl_vlm.learning.estimators import ESTIMATORS
from rl_vlm.learning.experience import Arrays, Estimate, EstimatorError, Experience
from rl_vlm.learning.returns import Rescaling, ReturnScale
from rl_vlm.models.weights import WeightPayload
from rl_vlm.tracing import Span
from rl_vlm.types import TrajectoryGroup

Metrics = dict[str, float]

_PER_TOKEN = (  # means over sampled tokens
    "policy/kl", "policy/approx_kl", "policy/entropy", "policy/token_logprob_mean", "policy/clip_fraction",
    "mismatch/kl", "mismatch/token_mult_prob_error", "mismatch/masked",
)  # fmt: skip
_LARGEST = ("policy/ratio_max", "policy/first_ratio_error", "memory/learner")
_STEPS = ("policy/optimizer_steps", "policy/skipped_steps")


class UpdateStats(dict[str, float]):
    """Sums over micro-batches and learners, under the names of the metrics that are made of them.

    `tokens` are the sampled ones. policy/entropy is NaN where it is not measured. policy/first_ratio_error is the
    largest |ratio - 1| on the first minibatch, where it was probed: it must be exactly 0.
    """

    def __missing__(self, name: str) -> float:
        return 0.0

    def add(self, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self[name] = max(self[name], value) if name in _LARGEST else self[name] + value

    @classmethod
    def merge(cls, parts: Sequence[UpdateStats]) -> UpdateStats:
        """The sums of all learners, which make the same steps with the same gradient."""
        merged = cls()
        for part in parts:
            merged.add(part)
        for name in (*_STEPS, "policy/grad_norm"):
            merged[name] = parts[0][name]
        return merged

    def metrics(self) -> Metrics:
        """Averages over tokens and steps."""
        tokens, steps = max(self["tokens"], 1.0), max(self["policy/optimizer_steps"], 1.0)
        metrics = {name: self[name] for name in (*_LARGEST, *_STEPS)}
        metrics |= {name: self[name] / tokens for name in _PER_TOKEN}
        metrics |= {name: self[name] / steps for name in ("policy/loss", "policy/grad_norm")}
        if "value/loss" in self:
            metrics["value/loss"] = self["value/loss"] / steps
        if "distill/divergence" in self:
            metrics["distill/divergence"] = self["distill/divergence"] / tokens
        if not self["tokens"]:
            metrics["mismatch/token_mult_prob_error"] = 1.0  # of factors that are 1 where engine and learner agree
        return metrics


@dataclass(slots=True)
class ScoreBatch:
    """One learner's minibatches, to be answered with `Scores`. (RLlib would take a list apart.)"""

    minibatches: list[Minibatch]


@dataclass(slots=True)
class Scores:
    """What the learners know before an update, by trajectory id: float32 [sampled tokens]."""

    log_ratio: Arrays = field(default_factory=dict)  # log-probability minus the base model's, for a KL penalty
    values: Arrays = field(default_factory=dict)  # the critic's, normalised

    @classmethod
    def merge(cls, parts: Sequence[Scores]) -> Scores:
        merged = cls()
        for part in parts:
            merged.log_ratio |= part.log_ratio
            merged.values |= part.values
        return merged


@dataclass(slots=True)
class TokenRecord:
    """What a run keeps of each sampled token, by trajectory id: float32 [sampled tokens]. The learner skips
    trajectories without an advantage, so `logprobs` and `entropies` lack these."""

    advantages: Arrays = field(default_factory=dict)
    values: Arrays = field(default_factory=dict)  # the critic's, in units of the reward
    logprobs: Arrays = field(default_factory=dict)  # of the policy before the update
    entropies: Arrays = field(default_factory=dict)  # nats, where they are measured


@dataclass(slots=True)
class UpdateBatch:
    """One learner's share of one update: its part of every optimiser step, and what all learners agree on."""

    minibatches: list[Minibatch]  # empty: the ones that the learner has scored last
    active: list[bool]  # by step: whether any learner has samples
    advantages: Arrays  # by trajectory id float32 [sampled tokens]
    returns: Arrays  # normalised; empty without a critic
    value_weights: list[float]  # by step, of the loss of a token that has a return
    rescaling: Rescaling | None = None  # of the critic's normalisation
    epochs: int = 1
    learn_policy: bool = True
    lr_factor: float = 1.0  # of the schedule
    version: int = 1  # of the adapter that the update makes
    folder: str = ""  # in shared memory, for that version of all weights
    trace: str = ""  # the span that the update belongs to
    record: bool = False  # answer with the tokens, too


@dataclass(slots=True)
class UpdateResult:
    """What a learner answers to an UpdateBatch. Learner 0 adds the new adapter."""

    stats: UpdateStats
    adapter: WeightPayload | None = None
    tokens: TokenRecord = field(default_factory=TokenRecord)
    spans: list[Span] = field(default_factory=list)  # of an update that is traced


def estimate_advantages(experience: Experience, settings: AlgorithmSection) -> Estimate:
    """By the configured estimator. Raises EstimatorError unless it gives a finite number per sampled token."""
    estimate = ESTIMATORS[settings.estimator](experience, settings)
    for trajectory in experience.trajectories:
        tokens = np.asarray(estimate.advantages.get(trajectory.trajectory_id))
        if tokens.shape != (trajectory.num_sampled,) or not np.isfinite(tokens).all():
            raise EstimatorError(
                f"algorithm.estimator {settings.estimator}: it must give one array per trajectory, by its id, with one "
                "finite number per sampled token."
            )
    return estimate


def divide(
    groups: Sequence[TrajectoryGroup], run: PolicyConfig, rng: np.random.Generator, estimate: Estimate | None = None
) -> list[list[Minibatch]]:
    """Divide groups into the steps of an epoch and these among the run's learners: `[learner][step]`.

    Weights are normalised over the whole step, all learners and skipped samples included, so neither the number of
    learners nor the skipping changes the gradient. With an `estimate` samples of zero advantage are skipped, unless
    something else gives them a gradient.
    """
    settings, num_learners = run.algorithm, max(run.learner.num_learners, 1)
    advantages = None if estimate is None or run.learns_without_advantage else estimate.advantages
    minibatches: list[list[Minibatch]] = [[] for _ in range(num_learners)]
    order = rng.permutation(len(groups))
    for members in np.array_split(order, min(settings.minibatches, max(len(groups), 1))):
        step = [groups[k].trajectories for k in members]
        lengths = [t.num_sampled for group in step for t in group]
        weight = _weights(lengths, settings.aggregation, run.rollout.max_new_tokens)
        shares = [Minibatch([], {}) for _ in range(num_learners)]
        load = [0] * num_learners
        kept = [
            [t for t in group if t.num_sampled and (advantages is None or advantages[t.trajectory_id].any())]
            for group in step
        ]
        # Longest first onto the least loaded learner keeps the learners' work even.
        for group in sorted(filter(None, kept), key=lambda group: -sum(map(len, group))):
            learner = load.index(min(load))
            shares[learner].groups.append(group)
            shares[learner].weights |= {t.trajectory_id: weight(t.num_sampled) for t in group}
            load[learner] += sum(map(len, group))
        for steps, share in zip(minibatches, shares, strict=True):
            steps.append(share)
    return minibatches


def update_batches(
    minibatches: Sequence[Sequence[Minibatch]],
    estimate: Estimate,
    scale: ReturnScale | None = None,
    *,
    scored: bool = False,
    **how: Any,
) -> list[UpdateBatch]:
    """Each learner's share of an update from `divide`'s minibatches; returns are normalised by `scale`.

    `scored`: the learners have these minibatches, which are not sent again. `how`: further fields of UpdateBatch.
    """
    returns: Arrays = {}
    if scale is not None:
        for name, tokens in estimate.returns.items():
            returns[name] = ((tokens - scale.mean) / scale.std).astype(np.float32)
    steps = list(zip(*minibatches, strict=True))
    how["active"] = [any(part.groups for part in step) for step in steps]
    known = {name: int(np.isfinite(tokens).sum()) for name, tokens in returns.items()}
    counts = [sum(known.get(name, 0) for part in step for name in part.weights) for step in steps]
    how["value_weights"] = [1.0 / max(count, 1) for count in counts]

    def share(own: Sequence[Minibatch]) -> UpdateBatch:
        names = [name for step in own for name in step.weights]
        own_advantages = {name: estimate.advantages[name] for name in names}
        own_returns = {name: returns[name] for name in names} if returns else {}
        minibatches = [] if scored else list(own)
        return UpdateBatch(minibatches=minibatches, advantages=own_advantages, returns=own_returns, **how)

    return [share(own) for own in minibatches]


def _weights(lengths: Sequence[int], aggregation: str, max_new_tokens: int) -> Callable[[int], float]:
    """From a trajectory's sampled tokens to the weight of each one's loss, given those of all of the step."""
    sequences, tokens = len(lengths), sum(lengths)
    if aggregation == "sequence_mean":
        return lambda length: 1.0 / (length * sequences)
    if aggregation == "token_mean":
        return lambda length: 1.0 / tokens
    return lambda length: 1.0 / (max_new_tokens * sequences)


def make_experience(
    groups: Sequence[TrajectoryGroup],
    run: PolicyConfig,
    rng: np.random.Generator,
    scores: Scores | None = None,
    *,
    kl_coef: float = 0.0,
    scale: ReturnScale | None = None,
) -> Experience:
    """What an estimator sees of the groups.

    `overlong_buffer` takes its penalty from a trajectory's last turn. `shuffle_rewards`, a control with which nothing
    can be learned, gives total rewards to other trajectories. The learners' `scores` give the values, as returns by
    `scale`, and the penalty -kl_coef (old - reference) of each token.
    """
    settings, most = run.algorithm, run.rollout.max_new_tokens
    rewards: Arrays = {}
    for trajectory in (trajectory for group in groups for trajectory in group.trajectories):
        turns = rewards[trajectory.trajectory_id] = np.array([turn.reward for turn in trajectory.turns])
        if settings.overlong_buffer:
            turns[-1:] += overlong_penalty(trajectory.num_sampled, most, settings.overlong_buffer)
    if settings.shuffle_rewards:
        totals = rng.permutation([turns.sum() for turns in rewards.values()])
        for turns, total in zip(rewards.values(), totals, strict=True):
            turns[:] = 0
            turns[-1:] = total
    penalties, values = Arrays(), Arrays()
    if scores is not None and settings.kl_in_reward:
        penalties = {name: -kl_coef * tokens for name, tokens in scores.log_ratio.items()}
    if scores is not None and scale is not None:
        values = {name: tokens * scale.std + scale.mean for name, tokens in scores.values.items()}
    return Experience(groups, rewards, penalties, values)


def overlong_penalty(length: int, max_new_tokens: int, buffer: int) -> float:
    """DAPO's addition to the reward of a trajectory of `length` sampled tokens (arXiv 2503.14476, equation 13): 0 up to
    max_new_tokens - buffer, then linearly down to -1 at max_new_tokens."""
    return float(np.clip((max_new_tokens - buffer - length) / buffer, -1.0, 0.0))
